"""What the user asks of the engine: the model and the training recipe, validated on construction."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from engine.errors import SpecError

Tier = Literal["portable", "debug", "prod"]
Precision = Literal["bf16", "fp16", "fp8"]  # of activations and products in the tier prod
# What activations are stored in; fp8 is for some products alone.
HALF_DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
# What kernels take as fp32 must not become an infinity or a zero there.
LARGEST_FP32 = 2.0**128 - 2.0**104
SMALLEST_NORMAL_FP32 = 2.0**-126
PositiveFloat = Annotated[float, Field(ge=SMALLEST_NORMAL_FP32, le=LARGEST_FP32, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=LARGEST_FP32, allow_inf_nan=False)]
ParameterKind = Literal["matrix", "embedding", "bias", "norm"]


class Section(BaseModel):
    """A part of the configuration: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ModelSpec(Section):
    """A pre-norm GPT (Radford et al. 2019): embeddings, `layers` blocks of attention and MLP, final norm, head."""

    vocab: PositiveInt = Field(description="rows of the token embedding; may exceed the tokenizer's size")
    context: PositiveInt = Field(description="positions the model sees at once")
    d_model: PositiveInt = Field(description="width of the residual stream")
    heads: PositiveInt = Field(description="attention heads; must divide d_model")
    layers: Annotated[int, Field(ge=1, le=256)] = Field(description="number of blocks")
    hidden: PositiveInt = Field(description="width inside the MLP")
    activation: Literal["gelu", "relu"] = Field(description="MLP activation; gelu is the tanh form")
    dropout: Probability = Field(description="on embeddings, attention weights and both residual branches")
    linear_bias: bool = Field(description="whether linear layers have a bias")
    norm_parameters: bool = Field(description="whether LayerNorm has a gain and a bias")
    tied: bool = Field(description="whether the head uses the token embedding's weights")
    init_std: PositiveFloat = Field(description="standard deviation of initial weights")
    attention: Literal["stored", "tiled"] = Field(
        description="keep attention probabilities for the backward pass, or compute them again; never changes bits"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelSpec":
        if self.d_model % self.heads:
            raise ValueError(
                f"heads must divide d_model, found heads={self.heads}, d_model={self.d_model}: "
                f"set heads to a divisor such as {_nearest_divisor(self.d_model, self.heads)}"
            )
        if self.d_model // self.heads > 256:
            raise ValueError(
                f"a head may be at most 256 wide, found d_model/heads={self.d_model // self.heads}: use more heads"
            )
        if self.vocab > 2**24:
            raise ValueError(f"vocab may be at most 16777216, found {self.vocab}")
        return self

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads

    def identity(self) -> dict[str, Any]:
        """The fields that decide bits, as JSON: everything but `attention`, a choice of memory."""
        return self.model_dump(exclude={"attention"})


class TrainSpec(Section):
    """The recipe: AdamW (Loshchilov & Hutter 2019) with linear warm-up, cosine decay and global-norm clipping."""

    steps: PositiveInt = Field(description="optimizer steps of the whole run")
    batch: PositiveInt = Field(description="sequences per step")
    shards: PositiveInt = Field(description="logical shards the batch is cut into; must divide batch")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(description="key of weights, data order and dropout")
    learning_rate: NonNegativeFloat = Field(description="peak rate, reached after warm-up")
    final_learning_rate: NonNegativeFloat = Field(description="rate at the last step")
    warmup_steps: NonNegativeInt = Field(description="steps of linear warm-up")
    beta1: Probability = Field(description="decay of the first moment")
    beta2: Probability = Field(description="decay of the second moment")
    epsilon: PositiveFloat = Field(description="added outside the square root")
    weight_decay: NonNegativeFloat = Field(description="decoupled decay per unit of learning rate")
    decayed: list[ParameterKind] = Field(description="kinds of parameter that weight decay acts on")
    clip_norm: NonNegativeFloat = Field(description="largest global gradient norm; 0 switches clipping off")
    precision: Precision | None = Field(
        None, description="of activations and products: the tier prod needs one, the others have none"
    )

    @model_serializer(mode="wrap")
    def _without_absent_precision(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A recipe without a precision says nothing of one."""
        whole: dict[str, Any] = dump(self)
        if self.precision is None:
            whole.pop("precision", None)
        return whole

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainSpec":
        if self.batch % self.shards:
            raise ValueError(
                f"shards must divide batch, found batch={self.batch}, shards={self.shards}: "
                f"set shards to a divisor such as {_nearest_divisor(self.batch, self.shards)}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps may be at most steps={self.steps}, found {self.warmup_steps}")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate may be at most learning_rate={self.learning_rate}, "
                f"found {self.final_learning_rate}"
            )
        if len(set(self.decayed)) != len(self.decayed):
            raise ValueError(f"decayed names a kind twice: {self.decayed}")
        return self


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number`, up to 65,536, that is closest to `wanted`."""
    divisors = (d for d in range(1, min(number, 65536) + 1) if number % d == 0)
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def check_precision(tier: Tier, train: TrainSpec) -> None:
    """Raise SpecError unless the tier prod, and only it, has a precision."""
    if tier == "prod" and train.precision is None:
        raise SpecError(
            "train.precision: the tier prod needs one, found none: add precision: bf16 (or fp16, or the experiment fp8)"
        )
    if tier != "prod" and train.precision is not None:
        raise SpecError(
            f"train.precision: only the tier prod has one, found {train.precision} in the tier {tier}: remove it, or "
            "set tier: prod"
        )
