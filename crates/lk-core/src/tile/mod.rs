//! The panel layout: how a weight matrix lies in memory for the kernels.
//!
//! A matrix `[n, k]` is cut into **panels** of [`NR`] = 32 output channels. Inside a panel, step `s` holds one 32-bit
//! word per channel, and the word holds `KU` consecutive `k` of that channel (1, 2, 4 or 8 codes of 32, 16, 8 or 4 bits):
//!
//! ```text
//! step s:   | ch0: k0 .. k0+KU | ch1 | … | ch15 | ch16 | … | ch31 |      128 bytes, k0 = s * KU
//! panel:    | step 0 | step 1 | … | scales [group][32 or 1] | zeros [group][32] | group of k [k] | global | pad to 64 |
//! matrix:   | panel 0 | panel 1 | …
//! ```
//!
//! The lowest bits of a word are its first `k`. Scales are the checkpoint's own bytes, so that the layout is a
//! permutation of the checkpoint and [`unpack`] gives it back bit for bit. `n` is padded to 32 and `k` to [`K_TILE`] with
//! codes that decode to zero; unpacking drops the padding. One panel is read front to back, and so is the matrix.

mod expert;
mod pack;
mod source;
mod unpack;

pub use expert::{ExpertMatrix, ExpertSlice, Tensor};
pub use pack::{PackError, pack_panels};
pub use source::{CheckpointView, CodeOrder, Grid};
pub use unpack::{Unpacked, unpack};

use crate::format::{CodeKind, GlobalScale, WeightFormat};
use crate::{Error, Result};

/// Output channels of a panel.
pub const NR: usize = 32;

/// `k` is padded to a multiple of this: a whole number of steps for every code, and one AMX tile of bf16.
pub const K_TILE: usize = 32;

/// Bytes of a step: one 32-bit word for each channel of a panel.
pub const STEP_BYTES: usize = NR * 4;

/// Sizes and offsets of a packed matrix; everything follows from the format, the shape and where the slice begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileLayout {
    format: WeightFormat,
    n: usize,
    k: usize,
    k_padded: usize,
    k_phase: usize,
    group: usize,
    groups: usize,
    scale_channels: usize,
    scale_offset: usize,
    zero_offset: usize,
    index_offset: usize,
    global_offset: usize,
    panel_bytes: usize,
}

impl TileLayout {
    /// Layout of a whole matrix of `n` output channels and `k` inputs.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for an empty matrix or sizes beyond the address space, [`Error::UnsupportedFormat`] for a format
    /// whose parts don't fit together.
    pub fn new(format: WeightFormat, n: usize, k: usize) -> Result<Self> {
        Self::sliced(format, n, k, 0, 0)
    }

    /// Layout of a slice whose first channel and first `k` are `n_start` and `k_start` of the checkpoint's matrix. Only
    /// their place inside a scale block matters: a scale that two slices share lies in both.
    ///
    /// # Errors
    ///
    /// As [`TileLayout::new`]; also [`Error::Shape`] when `k_start` cuts a group of 16 `k`.
    pub fn sliced(format: WeightFormat, n: usize, k: usize, n_start: usize, k_start: usize) -> Result<Self> {
        format.validate()?;
        let shape = |why: &str| {
            Error::Shape(format!("{format} weights [{n}, {k}] from channel {n_start} and k {k_start}: {why}"))
        };
        if n == 0 || k == 0 {
            return Err(shape("no dimension may be zero"));
        }
        if n > u32::MAX as usize || k > u32::MAX as usize / 64 {
            return Err(shape("dimensions of this size are not supported"));
        }
        let k_padded = k.next_multiple_of(K_TILE);
        let (mut group, mut k_phase, mut scale_channels, mut scale_bytes) = (k_padded, 0, 0, 0);
        if let Some(scale) = format.scale {
            scale_bytes = scale.kind.bytes();
            if scale.group > 0 {
                group = scale.group as usize;
                k_phase = k_start % group;
                if k_phase % 16 != 0 {
                    return Err(shape("a slice must begin at a multiple of 16 inside a scale group"));
                }
            }
            let (rows, n_phase) = (scale.rows as usize, n_start % scale.rows as usize);
            scale_channels = if rows % NR == 0 && n_phase % NR == 0 { 1 } else { NR };
        }
        if format.act_order {
            // Any k of the slice may belong to any group of the matrix.
            return Err(shape("the groups of the whole matrix are needed: TileLayout::slice_of"));
        }
        let groups = if format.scale.is_some() { (k_phase + k_padded).div_ceil(group) } else { 0 };
        Ok(Self::place(format, n, k, k_phase, group, groups, scale_channels, scale_bytes))
    }

    /// Layout of a slice of a matrix of `k_whole` inputs, act-order or not.
    ///
    /// # Errors
    ///
    /// As [`TileLayout::sliced`] and [`TileLayout::act_order`].
    pub fn slice_of(
        format: WeightFormat,
        n: usize,
        k: usize,
        n_start: usize,
        k_start: usize,
        k_whole: usize,
    ) -> Result<Self> {
        match format.scale {
            Some(scale) if format.act_order => {
                let groups = if scale.group == 0 { 1 } else { k_whole.div_ceil(scale.group as usize) };
                Self::act_order(format, n, k, groups)
            }
            _ => Self::sliced(format, n, k, n_start, k_start),
        }
    }

    /// Layout of an act-order matrix (or slice) whose `k` look up one of `groups` groups.
    ///
    /// # Errors
    ///
    /// As [`TileLayout::new`]; also [`Error::Shape`] for no groups or more than 65,536.
    pub fn act_order(format: WeightFormat, n: usize, k: usize, groups: usize) -> Result<Self> {
        format.validate()?;
        let Some(scale) = format.scale.filter(|_| format.act_order && n > 0 && k > 0) else {
            return Err(Error::Shape(format!("{format} weights [{n}, {k}] have no looked-up groups")));
        };
        if groups == 0 || groups > 1 << 16 {
            return Err(Error::Shape(format!(
                "{format} weights [{n}, {k}]: {groups} groups; 1 to 65536 work"
            )));
        }
        Ok(Self::place(format, n, k, 0, scale.group as usize, groups, NR, scale.kind.bytes()))
    }

    fn place(
        format: WeightFormat,
        n: usize,
        k: usize,
        k_phase: usize,
        group: usize,
        groups: usize,
        scale_channels: usize,
        scale_bytes: usize,
    ) -> Self {
        let k_padded = k.next_multiple_of(K_TILE);
        let scale_offset = k_padded / format.code.per_word() * STEP_BYTES;
        let zero_offset = scale_offset + (groups * scale_channels * scale_bytes).next_multiple_of(4);
        let index_offset = zero_offset + if format.zero_point { groups * NR } else { 0 };
        let global_offset = index_offset + if format.act_order { k_padded * 2 } else { 0 };
        let end = global_offset + if format.global == GlobalScale::None { 0 } else { 4 };
        Self {
            format,
            n,
            k,
            k_padded,
            k_phase,
            group,
            groups,
            scale_channels,
            scale_offset,
            zero_offset,
            index_offset,
            global_offset,
            panel_bytes: end.next_multiple_of(64),
        }
    }

    /// Format of the weights.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Element code of the weights.
    pub fn code(&self) -> CodeKind {
        self.format.code
    }

    /// Output channels, without padding.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs, without padding.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Inputs with padding: the length of an operand row, whose padding must be zero.
    pub fn k_padded(&self) -> usize {
        self.k_padded
    }

    /// Panels of the matrix.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(NR)
    }

    /// Bytes from one panel to the next, a multiple of 64.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of all panels.
    pub fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes
    }

    /// Steps of a panel.
    pub fn steps(&self) -> usize {
        self.k_padded / self.format.code.per_word()
    }

    /// `k` that share a scale; the padded `k` if a row has one scale or none.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Place of the first `k` inside its scale group.
    pub fn k_phase(&self) -> usize {
        self.k_phase
    }

    /// Scale groups along `k`, with padding; 0 without scales.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Scales stored per group in a panel: 32, or 1 where a scale covers the whole panel; 0 without scales.
    pub fn scale_channels(&self) -> usize {
        self.scale_channels
    }

    /// Offset of the scales in a panel; also the bytes of its codes.
    pub fn scale_offset(&self) -> usize {
        self.scale_offset
    }

    /// Offset of the zero points, one signed byte per group and channel: the zero point minus 8 (4-bit) or 128 (8-bit).
    pub fn zero_offset(&self) -> usize {
        self.zero_offset
    }

    /// Offset of the group of each `k`, `u16` little-endian.
    pub fn index_offset(&self) -> usize {
        self.index_offset
    }

    /// Offset of the matrix's scale, f32 little-endian.
    pub fn global_offset(&self) -> usize {
        self.global_offset
    }

    /// The scale group of `k`, for layouts without a looked-up group.
    pub fn group_of(&self, k: usize) -> usize {
        (self.k_phase + k) / self.group
    }

    /// Panel `p` of a packed matrix.
    pub fn panel<'a>(&self, packed: &'a [u8], p: usize) -> &'a [u8] {
        &packed[p * self.panel_bytes..][..self.panel_bytes]
    }
}
