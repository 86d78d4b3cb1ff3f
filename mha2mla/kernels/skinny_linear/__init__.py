"""A product of few rows with a weight, at the rate at which the weight is read; what follows it is done with it."""
