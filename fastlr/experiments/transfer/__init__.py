"""Transfer of a forecaster between time series (paper, section on time-series transfer)."""
