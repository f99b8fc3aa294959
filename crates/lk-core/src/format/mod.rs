//! Weight formats: how the codes of a checkpoint become numbers.
//!
//! A [`WeightFormat`] is a plain description: the element code, an optional scale per group of `k`, an
//! optional zero point per group and an optional scale of the whole matrix,
//!
//! ```text
//! w[n, k] = (code[n, k] - zero[group(n, k)]) * scale[group(n, k)] * global
//! ```
//!
//! Nothing here names an instruction set; `reference` decodes every format with scalar arithmetic and is the oracle of
//! all tests.

pub mod code;
mod parse;
pub mod reference;

use crate::{Dtype, Error, Result};

/// Element code of a weight matrix as it lies in a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CodeKind {
    /// IEEE binary32.
    F32,
    /// Upper half of an f32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8-bit float `e4m3fn`.
    E4m3,
    /// Two's complement byte. Offset-binary checkpoints are stored with the top bit flipped.
    I8,
    /// Offset-binary nibble: the number is `code - 8`.
    U4,
    /// 4-bit float `e2m1`.
    E2m1,
}

impl CodeKind {
    /// All codes, for tables and tests.
    pub const ALL: [Self; 7] = [Self::F32, Self::Bf16, Self::F16, Self::E4m3, Self::I8, Self::U4, Self::E2m1];

    /// Bits of one code.
    pub const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::E4m3 | Self::I8 => 8,
            Self::U4 | Self::E2m1 => 4,
        }
    }

    /// Codes in one 32-bit word (`KU`): consecutive `k` of one output channel.
    pub const fn per_word(self) -> usize {
        32 / self.bits()
    }

    /// A 32-bit word of codes that all decode to zero.
    pub const fn zero_word(self) -> u32 {
        match self {
            Self::U4 => 0x8888_8888,
            _ => 0,
        }
    }

    /// Name in kernel names and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::E4m3 => "e4m3",
            Self::I8 => "i8",
            Self::U4 => "u4",
            Self::E2m1 => "e2m1",
        }
    }
}

/// Encoding of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleKind {
    /// IEEE binary32.
    F32,
    /// Upper half of an f32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8-bit float `e4m3fn`.
    E4m3,
    /// Power of two, `2^(b-127)`.
    E8m0,
}

impl ScaleKind {
    /// Bytes of one scale.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::E8m0 => 1,
        }
    }

    /// The encoding of a scale tensor of `dtype`; bytes without a type of their own (`uint8`) are `e8m0`.
    pub const fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::Bf16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::E4m3 => Some(Self::E4m3),
            Dtype::E8m0 | Dtype::U8 => Some(Self::E8m0),
            _ => None,
        }
    }

    /// Name in format names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::E4m3 => "e4m3",
            Self::E8m0 => "e8m0",
        }
    }
}

/// One scale per `rows` output channels and `group` consecutive `k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupScale {
    /// Encoding of the scales.
    pub kind: ScaleKind,
    /// `k` per scale, a multiple of 16; 0 means the whole row (one scale per channel).
    pub group: u32,
    /// Output channels per scale: 1, or the block height of block-scaled formats.
    pub rows: u32,
}

/// What the scale of the whole matrix does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GlobalScale {
    /// There is none.
    None,
    /// Weights are multiplied by it.
    Multiply,
    /// Weights are divided by it (compressed-tensors `weight_global_scale`).
    Divide,
}

/// How the codes of one weight matrix become numbers. See the module's equation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightFormat {
    /// Element code.
    pub code: CodeKind,
    /// Scale per group.
    pub scale: Option<GroupScale>,
    /// A zero point per group and channel, in units of the code.
    pub zero_point: bool,
    /// Scale of the matrix.
    pub global: GlobalScale,
    /// The group of each `k` is looked up (`g_idx` of act-order checkpoints) instead of being `k / group`.
    pub act_order: bool,
}

impl WeightFormat {
    /// Unscaled f32 weights.
    pub const F32: Self = Self::plain(CodeKind::F32);
    /// Unscaled bf16 weights.
    pub const BF16: Self = Self::plain(CodeKind::Bf16);
    /// Unscaled f16 weights.
    pub const F16: Self = Self::plain(CodeKind::F16);
    /// e4m3 weights with one f32 scale for the matrix.
    pub const FP8_TENSOR: Self = Self { global: GlobalScale::Multiply, ..Self::plain(CodeKind::E4m3) };
    /// e4m3 weights, `e8m0` scale per 32 `k`.
    pub const MXFP8: Self = Self::scaled(CodeKind::E4m3, ScaleKind::E8m0, 32, 1);
    /// e2m1 weights, `e8m0` scale per 32 `k`.
    pub const MXFP4: Self = Self::scaled(CodeKind::E2m1, ScaleKind::E8m0, 32, 1);
    /// e2m1 weights, `e4m3` scale per 16 `k`, times `weight_scale_2` (`ModelOpt`).
    pub const NVFP4: Self =
        Self { global: GlobalScale::Multiply, ..Self::scaled(CodeKind::E2m1, ScaleKind::E4m3, 16, 1) };
    /// The same divided by `weight_global_scale` (compressed-tensors).
    pub const NVFP4_DIVIDE: Self = Self { global: GlobalScale::Divide, ..Self::NVFP4 };

    const fn plain(code: CodeKind) -> Self {
        Self { code, scale: None, zero_point: false, global: GlobalScale::None, act_order: false }
    }

    /// Codes with one scale per `rows` channels and `group` `k` (0: the whole row).
    pub const fn scaled(code: CodeKind, kind: ScaleKind, group: u32, rows: u32) -> Self {
        Self { scale: Some(GroupScale { kind, group, rows }), ..Self::plain(code) }
    }

    /// e4m3 weights with one scale per `block_n` × `block_k` block.
    pub const fn fp8_block(kind: ScaleKind, block_n: u32, block_k: u32) -> Self {
        Self::scaled(CodeKind::E4m3, kind, block_k, block_n)
    }

    /// e4m3 weights with one scale per output channel.
    pub const fn fp8_channel(kind: ScaleKind) -> Self {
        Self::scaled(CodeKind::E4m3, kind, 0, 1)
    }

    /// Signed bytes with one scale per channel (`group` 0) or group.
    pub const fn int8(kind: ScaleKind, group: u32, zero_point: bool) -> Self {
        Self { zero_point, ..Self::scaled(CodeKind::I8, kind, group, 1) }
    }

    /// Offset-binary nibbles with one scale per channel (`group` 0) or group.
    pub const fn int4(kind: ScaleKind, group: u32, zero_point: bool) -> Self {
        Self { zero_point, ..Self::scaled(CodeKind::U4, kind, group, 1) }
    }

    /// The same format with a looked-up group per `k` (GPTQ `desc_act`).
    #[must_use]
    pub const fn with_act_order(self) -> Self {
        Self { act_order: true, ..self }
    }

    /// The unscaled format of a floating-point tensor.
    pub fn from_dtype(dtype: Dtype) -> Result<Self> {
        match dtype {
            Dtype::F32 => Ok(Self::F32),
            Dtype::Bf16 => Ok(Self::BF16),
            Dtype::F16 => Ok(Self::F16),
            other => Err(Error::UnsupportedFormat(format!(
                "weights of dtype {other} need a scale; unscaled weights are f32, bf16 or f16"
            ))),
        }
    }

    /// Checks that the parts fit together; every other function takes a checked format.
    pub fn validate(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::UnsupportedFormat(format!("{self}: {why}")));
        if let Some(s) = self.scale {
            if s.group % 16 != 0 {
                return refuse("the scale group must be a multiple of 16 along k");
            }
            if s.rows == 0 {
                return refuse("a scale must cover at least one output channel");
            }
        }
        match self.code {
            CodeKind::F32 | CodeKind::Bf16 | CodeKind::F16 => {
                if self.scale.is_some() || self.global != GlobalScale::None {
                    return refuse("floating-point weights of 16 or 32 bits carry no scale");
                }
            }
            CodeKind::E4m3 => {
                if self.scale.is_none() && self.global == GlobalScale::None {
                    return refuse("e4m3 weights need a scale");
                }
            }
            CodeKind::I8 | CodeKind::U4 | CodeKind::E2m1 => {
                if self.scale.is_none() {
                    return refuse("integer and 4-bit weights need a scale per channel or group");
                }
            }
        }
        if self.zero_point && !matches!(self.code, CodeKind::I8 | CodeKind::U4) {
            return refuse("only integer codes have zero points");
        }
        if self.act_order && !matches!(self.code, CodeKind::I8 | CodeKind::U4) {
            return refuse("only integer codes have a looked-up group");
        }
        Ok(())
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.code.name())?;
        if let Some(s) = self.scale {
            match (s.group, s.rows) {
                (0, 1) => write!(f, "-channel-{}", s.kind.name())?,
                (g, 1) => write!(f, "-g{g}-{}", s.kind.name())?,
                (0, n) => write!(f, "-rows{n}-{}", s.kind.name())?,
                (g, n) => write!(f, "-{n}x{g}-{}", s.kind.name())?,
            }
        }
        if self.zero_point {
            f.write_str("-zp")?;
        }
        match self.global {
            GlobalScale::None => {}
            GlobalScale::Multiply => f.write_str("-global")?,
            GlobalScale::Divide => f.write_str("-globaldiv")?,
        }
        if self.act_order {
            f.write_str("-actorder")?;
        }
        Ok(())
    }
}
