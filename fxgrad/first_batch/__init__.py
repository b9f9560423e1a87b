"""The check of the first batch: fxgrad changes two samples, and no result of another sample may change."""
