"""Reports: one page about a run or several, read from their folders, live or afterwards."""
