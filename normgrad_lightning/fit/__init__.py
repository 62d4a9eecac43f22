"""One `fit`: which of its steps are read, and how what was seen is shown one step later."""
