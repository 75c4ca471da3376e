"""What happened in a run, on one page: read from the run's folder, drawn for people, live or afterwards."""
