"""What is particular to Flower: its records, its bytes, its Grids."""
