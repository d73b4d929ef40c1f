"""What runs leave behind: records, sweeps, plots, pages."""
