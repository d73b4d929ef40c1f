"""Made-up visits: whose they are, and who holds them."""

import numpy as np

from simulations.data.visits import MAX_VISITS, make_visits, split_by_owner


def test_no_patient_is_in_two_clinics() -> None:
    visits = make_visits(50, 3, 1)
    clinics = split_by_owner(visits, 4)
    patients = [set(clinic.owners.tolist()) for clinic in clinics]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 50
    assert sum(len(clinic.targets) for clinic in clinics) == len(visits.owners)


def test_patients_have_unequal_numbers_of_visits() -> None:
    counts = np.bincount(make_visits(500, 3, 2).owners)
    assert (counts.min(), counts.max()) == (1, MAX_VISITS)


def test_first_visits_are_kept() -> None:
    visits = make_visits(50, 3, 3)
    kept = visits.keep_first(2)
    assert np.bincount(kept.owners).max() == 2
    assert len(set(kept.owners.tolist())) == 50
    first = int(np.flatnonzero(visits.owners == 7)[0])
    assert bool((kept.inputs == visits.inputs[first]).all(dim=1).any())
