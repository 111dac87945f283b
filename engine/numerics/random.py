"""Random numbers that are functions of an address, so that there is no generator state to lose.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011)
turns a 128-bit counter and a 64-bit key into four 32-bit words. Here

    key     = seed (low word, high word)
    counter = (block low word, block high word, site, step)

`site` names the place that draws (one dropout, one weight tensor), `step` is the training step, and
`block` numbers groups of elements of that place: word `i % 4` of block `i // 4` belongs to element
i. Normal variates need more bits: there a block gives the elements 2b and 2b + 1.

Limits: seed below 2^64, site below 2^32, step below 2^32 - 1, element below 2^63. The last value of
the step word addresses initial weights, so these share nothing with any training step.

Device functions take seed, step and site as uint32 words, elements and blocks as int64.
"""

from fractions import Fraction
from math import sqrt

import numpy as np

from engine.numerics.elementary import log64, sin_cos64
from engine.numerics.errors import NumericsDomainError
from engine.numerics.jit import device_function, kernel
from engine.numerics.types import Floats, Scalar

INITIAL_STEP = 2**32 - 1
STEP_LIMIT = INITIAL_STEP
SITE_LIMIT = 2**32
SEED_LIMIT = 2**64
ELEMENT_LIMIT = 2**63

Words = tuple[Scalar, Scalar, Scalar, Scalar]

MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
KEY_STEP_0 = np.uint32(0x9E3779B9)
KEY_STEP_1 = np.uint32(0xBB67AE85)
WORD_BITS = np.uint64(32)

TWO_PI = 6.283185307179586
UNIT_53 = 2.0**-53
# Of 64 random bits a float64 in [0, 1) takes the upper 53.
DROPPED_BITS = np.uint64(11)


@device_function
def _philox_round(
    counter0: Scalar,
    counter1: Scalar,
    counter2: Scalar,
    counter3: Scalar,
    key0: Scalar,
    key1: Scalar,
) -> Words:
    product0 = MULTIPLIER_0 * np.uint64(counter0)
    product1 = MULTIPLIER_1 * np.uint64(counter2)
    return (
        np.uint32(np.uint32(np.uint32(product1 >> WORD_BITS) ^ counter1) ^ key0),
        np.uint32(product1),
        np.uint32(np.uint32(np.uint32(product0 >> WORD_BITS) ^ counter3) ^ key1),
        np.uint32(product0),
    )


@device_function
def philox(
    counter0: Scalar,
    counter1: Scalar,
    counter2: Scalar,
    counter3: Scalar,
    key0: Scalar,
    key1: Scalar,
) -> Words:
    """Philox 4x32-10: four random words for a 128-bit counter and a 64-bit key."""
    words = _philox_round(counter0, counter1, counter2, counter3, key0, key1)
    # Unrolled by hand: a loop in here would keep the loop around it from being vectorised.
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    key0, key1 = np.uint32(key0 + KEY_STEP_0), np.uint32(key1 + KEY_STEP_1)
    words = _philox_round(words[0], words[1], words[2], words[3], key0, key1)
    return words


@device_function
def random_words4(seed_low: Scalar, seed_high: Scalar, step: Scalar, site: Scalar, block: Scalar) -> Words:
    """The words of elements `4 block` to `4 block + 3`: one Philox evaluation for four elements."""
    return philox(np.uint32(block), np.uint32(np.uint64(block) >> WORD_BITS), site, step, seed_low, seed_high)


@device_function
def random_word(seed_low: Scalar, seed_high: Scalar, step: Scalar, site: Scalar, element: Scalar) -> Scalar:
    """The word of one element, uniform over all 2^32 values."""
    w0, w1, w2, w3 = random_words4(seed_low, seed_high, step, site, element >> np.int64(2))
    lower = w1 if element & np.int64(1) else w0
    upper = w3 if element & np.int64(1) else w2
    return upper if element & np.int64(2) else lower


def dropout_threshold(probability: float) -> np.uint32:
    """`floor(p * 2^32)` for p the shortest decimal that reads as `probability`, exactly.

    An element is dropped iff its word is below this: never if p = 0, else with a probability that
    is at most p and less than 2^-32 from it.
    Raises NumericsDomainError unless `0 <= probability < 1`.
    """
    if not 0.0 <= probability < 1.0:
        raise NumericsDomainError(f"dropout probability: expected at least 0 and below 1, found {probability!r}")
    return np.uint32(Fraction(repr(float(probability))) * 2**32 // 1)


def split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    """The Philox key of a seed: its low and high word.

    Raises NumericsDomainError unless `0 <= seed < 2^64`.
    """
    _check_below("seed", seed, SEED_LIMIT)
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)


def check_step(step: int) -> np.uint32:
    """The step as a counter word. Raises NumericsDomainError unless `0 <= step < 2^32 - 1`."""
    _check_below("step", step, STEP_LIMIT)
    return np.uint32(step)


def check_site(site: int) -> np.uint32:
    """The site as a counter word. Raises NumericsDomainError unless `0 <= site < 2^32`."""
    _check_below("random site", site, SITE_LIMIT)
    return np.uint32(site)


def _check_below(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise NumericsDomainError(f"{name}: expected an integer from 0 to {limit - 1}, found {value}")


def uniform_u32(seed: int, step: int, site: int, element: int) -> int:
    """The 32-bit word at an address, for the host.

    Raises NumericsDomainError beyond the module's limits.
    """
    _check_below("element", element, ELEMENT_LIMIT)
    low, high = split_seed(seed)
    return int(_word_kernel(low, high, check_step(step), check_site(site), np.int64(element)))


@kernel
def _word_kernel(seed_low: Scalar, seed_high: Scalar, step: Scalar, site: Scalar, element: Scalar) -> Scalar:
    return random_word(seed_low, seed_high, step, site, element)


@device_function
def normal_pair64(
    seed_low: Scalar, seed_high: Scalar, step: Scalar, site: Scalar, block: Scalar
) -> tuple[Scalar, Scalar]:
    """The standard normal variates of elements `2 block` and `2 block + 1`, in float64.

    Box and Muller, 1958: the four words give two 53-bit uniforms, u in (0, 1] from words 0 and 1,
    a in [-1/2, 1/2) from words 2 and 3; the variates are `sqrt(-2 log u)` times the cosine and the
    sine of `2 pi a`, at most 8.57 in magnitude.
    """
    w0, w1, w2, w3 = random_words4(seed_low, seed_high, step, site, block)
    first = (np.uint64(w1) << WORD_BITS) | np.uint64(w0)
    second = (np.uint64(w3) << WORD_BITS) | np.uint64(w2)
    u = (float(np.int64(first >> DROPPED_BITS)) + 1.0) * UNIT_53
    a = float(np.int64(second >> DROPPED_BITS)) * UNIT_53 - 0.5
    radius = sqrt(-2.0 * log64(u))
    sine, cosine = sin_cos64(TWO_PI * a)
    return radius * cosine, radius * sine


def normal_fill(out: Floats, seed: int, site: int, std: float, start: int = 0) -> None:
    """Fill `out` (fp32, 1-D, contiguous) with normal variates: mean 0, standard deviation `std`.

    `out[i]` is element `start + i` of the site, whatever the range is cut into: the float64 variate
    times `std` in float64, then rounded to fp32. Raises NumericsDomainError beyond the module's
    limits, for another kind of array, and for a negative or non-finite `std`.
    """
    if out.dtype != np.float32 or out.ndim != 1 or not out.flags.c_contiguous:
        raise NumericsDomainError(
            f"normal_fill: expected a contiguous 1-D float32 array, found {out.dtype} {out.shape}"
        )
    if not 0.0 <= std < np.inf:
        raise NumericsDomainError(f"normal_fill: expected a finite std of at least 0, found {std!r}")
    _check_below("first element", start, ELEMENT_LIMIT - out.size)
    low, high = split_seed(seed)
    _normal_kernel(out, low, high, check_site(site), float(std), np.int64(start))


@kernel
def _normal_kernel(
    out: Floats,
    seed_low: Scalar,
    seed_high: Scalar,
    site: Scalar,
    std: Scalar,
    start: Scalar,
) -> None:
    step = np.uint32(INITIAL_STEP)
    size = out.size
    # The range may begin with the second element of a block and end with the first of one.
    leading = int(start & np.int64(1)) if size else 0
    first_block = (start + leading) >> np.int64(1)
    pairs = (size - leading) >> 1
    if leading:
        out[0] = np.float32(std * normal_pair64(seed_low, seed_high, step, site, first_block - 1)[1])
    for i in range(pairs):
        even, odd = normal_pair64(seed_low, seed_high, step, site, first_block + i)
        out[leading + 2 * i] = np.float32(std * even)
        out[leading + 2 * i + 1] = np.float32(std * odd)
    if leading + 2 * pairs < size:
        out[size - 1] = np.float32(std * normal_pair64(seed_low, seed_high, step, site, first_block + pairs)[0])
