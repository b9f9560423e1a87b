"""Programs written to let samples meet unseen, by kind, each with what fxgrad has to make of it."""
