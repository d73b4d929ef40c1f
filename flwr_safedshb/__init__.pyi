"""The public names, and where each is. There is no other list of them."""

from .aggregation import (
    ARC as ARC,
    CAF as CAF,
    CGE as CGE,
    MDA as MDA,
    NNM as NNM,
    SMEA as SMEA,
    Average as Average,
    Bucketing as Bucketing,
    Bulyan as Bulyan,
    CentredClipping as CentredClipping,
    DnC as DnC,
    Filter as Filter,
    GeometricMedian as GeometricMedian,
    Krum as Krum,
    Meamed as Meamed,
    Median as Median,
    MoNNA as MoNNA,
    MultiKrum as MultiKrum,
    SignGuard as SignGuard,
    StaticClipping as StaticClipping,
    TrimmedMean as TrimmedMean,
    Weighing as Weighing,
)
from .attacks import (
    ALIE as ALIE,
    FOE as FOE,
    Drift as Drift,
    FarCluster as FarCluster,
    Gaussian as Gaussian,
    HugeNorm as HugeNorm,
    LabelFlip as LabelFlip,
    Mimic as Mimic,
    MimicShift as MimicShift,
    MinMax as MinMax,
    MinSum as MinSum,
    NonFinite as NonFinite,
    PushPlanner as PushPlanner,
    SignFar as SignFar,
    SignFlip as SignFlip,
    Strongest as Strongest,
    Target as Target,
    Zero as Zero,
)
from .client import SafeDSHBClient as SafeDSHBClient
from .app import client_app as client_app
from .algorithm.answer_evaluation import PrivateEvaluation as PrivateEvaluation
from .central_dp import PLDAccountant as PLDAccountant
from .algorithm.model_arrays import trained_arrays as trained_arrays
from .simulation.adversarial import AdversarialGrid as AdversarialGrid
from .simulation.batched import BatchedGrid as BatchedGrid
from .simulation.in_process import InProcessGrid as InProcessGrid
from .privacy.clipping.gradients import (
    ClippedGradients as ClippedGradients,
    check_model as check_model,
)
from .privacy.private_gradient import private_gradient as private_gradient
from .privacy.ledger.ledger import (
    BudgetExhausted as BudgetExhausted,
    Ledger as Ledger,
)
from .privacy.plan import (
    PrivacyPlan as PrivacyPlan,
    PrivacyStatement as PrivacyStatement,
)
from .privacy.policy import (
    NodePolicy as NodePolicy,
    PolicyViolation as PolicyViolation,
)
from .privacy.randomness.noise import (
    SecureRandomness as SecureRandomness,
    SeededRandomness as SeededRandomness,
)
from .privacy.target import PrivacyTarget as PrivacyTarget
from .legacy_api import ClassicStrategy as ClassicStrategy
from .algorithm.checkpoint import load_checkpoint as load_checkpoint
from .algorithm.norm_bound import NormBound as NormBound
from .algorithm.privacy_card import (
    PrivacyCard as PrivacyCard,
    privacy_card as privacy_card,
)
from .strategy import SafeDSHB as SafeDSHB
from .theory import heterogeneity as heterogeneity

__all__: list[str]
