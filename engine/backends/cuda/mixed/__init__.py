"""The tier `prod`: 16-bit activations and products by NVIDIA's libraries, fp32 weights, moments and sums."""
