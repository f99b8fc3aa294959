//! Element types of tensors that enter the engine.

/// Element type of a tensor as a checkpoint or a caller holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// Upper half of an f32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinity (`e4m3fn`).
    E4m3,
    /// Power-of-two byte scale, 2^(b-127).
    E8m0,
    /// Unsigned byte, also two packed 4-bit codes.
    U8,
    /// Signed byte.
    I8,
    /// 32-bit integer, also packed 4- or 8-bit codes.
    I32,
    /// 64-bit integer (`weight_shape`).
    I64,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::E8m0 | Self::U8 | Self::I8 => 1,
        }
    }

    /// The name that safetensors headers and messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::E4m3 => "f8_e4m3",
            Self::E8m0 => "f8_e8m0",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }

    /// Inverse of [`Dtype::name`]; also takes torch's names (`float32`, `bfloat16`, `float8_e4m3fn`, …).
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "f32" | "float32" | "F32" => Self::F32,
            "bf16" | "bfloat16" | "BF16" => Self::Bf16,
            "f16" | "float16" | "F16" => Self::F16,
            "f8_e4m3" | "float8_e4m3fn" | "F8_E4M3" => Self::E4m3,
            "f8_e8m0" | "float8_e8m0fnu" | "F8_E8M0" => Self::E8m0,
            "u8" | "uint8" | "U8" => Self::U8,
            "i8" | "int8" | "I8" => Self::I8,
            "i32" | "int32" | "I32" => Self::I32,
            "i64" | "int64" | "I64" => Self::I64,
            _ => return None,
        })
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
