"""The mathematics of every operation in float64 NumPy: modules named as in engine/operations.

Nothing here is quantised, blocked or fast, and nothing here is on the way to a trained bit: tests
hold the kernels against it. Tensors are float64 and shaped as the operations have them; `keep`
holds a dropout mask's multipliers (0 or 1/(1-p)), or is None without dropout. Gradients are
returned, never accumulated.
"""
