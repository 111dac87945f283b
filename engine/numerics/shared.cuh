// Addresses in shared memory, as the card's own instructions take them.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint32 shared_address(const void *p) { return (uint32)__cvta_generic_to_shared(p); }
