"""Tables, plots and JSON of measurements."""
