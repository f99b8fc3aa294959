//! Checkpoint to panels.

use super::source::{AWQ_NIBBLE, CheckpointView, CodeOrder};
use super::{NR, STEP_BYTES, TileLayout};
use crate::Error;
use crate::format::{CodeKind, code};
use crate::simd::{BLOCK_WORDS, transpose_words};
use std::ops::Range;

/// Why a matrix was not packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// A weight or scale is NaN or infinite.
    #[error("{part} at row {row}, column {col} is NaN or infinite")]
    NotFinite {
        /// `weight` or `scale`.
        part: &'static str,
        /// Output channel in the view.
        row: usize,
        /// `k` of the weight, or group of the scale.
        col: usize,
    },
    /// View, layout and destination do not describe the same matrix.
    #[error("{0}")]
    Mismatch(String),
}

impl From<PackError> for Error {
    fn from(e: PackError) -> Self {
        match e {
            PackError::Mismatch(text) => Self::Shape(text),
            finite => Self::Corrupt(finite.to_string()),
        }
    }
}

/// Packs the panels `panels` of `view`. Panel `panels.start + i` is written to `dst` at `i * dst_step` panels, so that two
/// matrices may alternate (`dst_step` 2: gate at 0, up one panel further); `dst` ends with the last panel at the earliest.
/// Disjoint ranges may be packed by different threads.
///
/// # Errors
///
/// [`PackError::NotFinite`] names the first bad weight of the first bad panel; the destination is then unspecified.
/// [`PackError::Mismatch`] if the parts do not fit together.
pub fn pack_panels(
    view: &CheckpointView<'_>,
    layout: &TileLayout,
    panels: Range<usize>,
    dst: &mut [u8],
    dst_step: usize,
) -> Result<(), PackError> {
    let (format, n, k) = (layout.format(), layout.n(), layout.k());
    if view.format != format || view.n != n || view.k != k {
        return Err(PackError::Mismatch(format!(
            "a view of {} weights [{}, {}] does not fill a layout of {format} [{n}, {k}]",
            view.format, view.n, view.k
        )));
    }
    let (k_phase, groups) = match (&view.scales, layout.group()) {
        (Some(s), _) if format.act_order => (0, s.groups),
        (Some(s), group) if format.scale.is_some_and(|s| s.group > 0) => (s.k_start % group, layout.groups()),
        _ => (0, layout.groups()),
    };
    if k_phase != layout.k_phase() || groups != layout.groups() {
        return Err(PackError::Mismatch(format!(
            "{format}: a view that begins {k_phase} k into a scale group ({groups} groups) for a layout that begins {} k into \
             one ({} groups)",
            layout.k_phase(),
            layout.groups()
        )));
    }
    if let (Some(s), Some(scale), 1) = (&view.scales, format.scale, layout.scale_channels())
        && !(s.n_start % scale.rows as usize).is_multiple_of(NR)
    {
        return Err(PackError::Mismatch(format!(
            "{format}: a view that begins at channel {} for a layout whose panels have one scale",
            s.n_start
        )));
    }
    let stride = dst_step * layout.panel_bytes();
    let wanted =
        panels.len().saturating_sub(1) * stride + if panels.is_empty() { 0 } else { layout.panel_bytes() };
    if panels.end > layout.panels() || dst_step == 0 || dst.len() < wanted {
        return Err(PackError::Mismatch(format!(
            "panels {panels:?} of {} at every {dst_step}-th place do not fit in {} bytes",
            layout.panels(),
            dst.len()
        )));
    }
    for (i, p) in panels.enumerate() {
        let panel = &mut dst[i * stride..][..layout.panel_bytes()];
        pack_codes(view, layout, p, panel);
        if !codes_finite(layout.code(), &panel[..layout.scale_offset()]) {
            return Err(find_bad_code(layout, p, panel));
        }
        panel[layout.scale_offset()..].fill(0);
        pack_scales(view, layout, p, panel)?;
        pack_zeros(view, layout, p, panel);
        if let Some(index) = view.index {
            let groups = index.as_chunks::<4>().0;
            for (to, group) in panel[layout.index_offset()..].chunks_exact_mut(2).zip(groups) {
                to.copy_from_slice(&group[..2]);
            }
        }
        if let Some(global) = view.global {
            panel[layout.global_offset()..][..4].copy_from_slice(&global.to_le_bytes());
        }
    }
    Ok(())
}

fn pack_codes(view: &CheckpointView<'_>, layout: &TileLayout, p: usize, panel: &mut [u8]) {
    let code = layout.code();
    let rows = NR.min(view.n - p * NR);
    let codes = &mut panel[..layout.scale_offset()];
    match view.order {
        CodeOrder::Rows | CodeOrder::RowsOffsetBinary => pack_rows(view, p, rows, codes),
        CodeOrder::Elements => pack_elements(view, p, rows, codes),
        CodeOrder::WordsAlongK => pack_words_along_k(view, p, rows, codes),
        CodeOrder::AwqWords => pack_awq(view, p, rows, codes),
    }
    let flips = view.order == CodeOrder::RowsOffsetBinary
        || view.order == CodeOrder::WordsAlongK && code == CodeKind::I8;
    if flips {
        for byte in codes.iter_mut() {
            *byte ^= 0x80;
        }
    }
    if rows < NR || layout.k_padded() != layout.k() {
        pad(code, layout.k(), rows, codes);
    }
}

/// Words `[k / per_word, n]` are the words of the panel, step by step.
fn pack_words_along_k(view: &CheckpointView<'_>, p: usize, rows: usize, codes: &mut [u8]) {
    let steps = view.k.div_ceil(view.format.code.per_word());
    for (s, step) in codes.chunks_exact_mut(STEP_BYTES).enumerate().take(steps) {
        step[..rows * 4].copy_from_slice(view.codes.run(s, p * NR, rows));
    }
}

/// AWQ words hold eight channels of one `k`; a panel word holds eight `k` of one channel.
fn pack_awq(view: &CheckpointView<'_>, p: usize, rows: usize, codes: &mut [u8]) {
    for (s, step) in codes.chunks_exact_mut(STEP_BYTES).enumerate() {
        for first in (0..rows).step_by(8) {
            let mut out = [0u32; 8];
            for j in 0..8.min(view.k.saturating_sub(s * 8)) {
                let word = view.codes.word(s * 8 + j, p * (NR / 8) + first / 8);
                for (c, out) in out.iter_mut().enumerate() {
                    *out |= ((word >> (4 * AWQ_NIBBLE[c])) & 15) << (4 * j);
                }
            }
            for (c, word) in out.iter().enumerate().take(rows - first) {
                step[(first + c) * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

/// Scales as they are, `[group][channel]`; groups and channels of the padding stay zero.
fn pack_scales(
    view: &CheckpointView<'_>,
    layout: &TileLayout,
    p: usize,
    panel: &mut [u8],
) -> Result<(), PackError> {
    let (Some(scale), Some(source)) = (layout.format().scale, &view.scales) else { return Ok(()) };
    let bytes = scale.kind.bytes();
    let first_group = match scale.group as usize {
        0 => 0,
        _ if view.index.is_some() => 0,
        group => source.k_start / group,
    };
    let rows = NR.min(view.n - p * NR).min(layout.scale_channels());
    let out = &mut panel[layout.scale_offset()..];
    for group in 0..layout.groups().min(source.groups - first_group) {
        for c in 0..rows {
            let row = (source.n_start + p * NR + c) / scale.rows as usize;
            let value = source.grid.get(row, first_group + group);
            if !code::decode_scale(scale.kind, value).is_finite() {
                return Err(PackError::NotFinite { part: "scale", row: p * NR + c, col: group });
            }
            out[(group * layout.scale_channels() + c) * bytes..][..bytes].copy_from_slice(value);
        }
    }
    Ok(())
}

/// Zero points less half the range of the code, `[group][channel]`.
fn pack_zeros(view: &CheckpointView<'_>, layout: &TileLayout, p: usize, panel: &mut [u8]) {
    let (Some(zeros), Some(scales)) = (&view.zeros, &view.scales) else { return };
    let bits = layout.code().bits();
    let half = 1i32 << (bits - 1);
    let real = match layout.format().scale.map_or(0, |s| s.group as usize) {
        0 => 1,
        _ if view.index.is_some() => scales.groups,
        group => (layout.k_phase() + view.k).div_ceil(group),
    };
    for group in 0..layout.groups().min(real) {
        for c in 0..NR.min(view.n - p * NR) {
            let zero = zeros.get(bits, p * NR + c, group) as i32 - half;
            panel[layout.zero_offset() + group * NR + c] = zero as i8 as u8;
        }
    }
}

fn pack_rows(view: &CheckpointView<'_>, p: usize, rows: usize, codes: &mut [u8]) {
    let per_element = view.codes.element_bytes * 8 / view.format.code.bits();
    let columns = view.k.div_ceil(per_element);
    let row_bytes = columns * view.codes.element_bytes;
    let whole_steps = row_bytes / 4;
    let source: [&[u8]; NR] = std::array::from_fn(|c| view.codes.run(p * NR + c.min(rows - 1), 0, columns));
    let (blocks, rest) = codes.split_at_mut(whole_steps / BLOCK_WORDS * BLOCK_WORDS * STEP_BYTES);
    for (b, block) in blocks.chunks_exact_mut(BLOCK_WORDS * STEP_BYTES).enumerate() {
        let lines: [&[u8]; NR] =
            std::array::from_fn(|c| &source[c][b * BLOCK_WORDS * 4..][..BLOCK_WORDS * 4]);
        transpose_words(&lines, block);
    }
    for (s, step) in rest.chunks_exact_mut(STEP_BYTES).enumerate() {
        let at = (whole_steps / BLOCK_WORDS * BLOCK_WORDS + s) * 4;
        for (word, row) in step.chunks_exact_mut(4).zip(&source) {
            let left = row.get(at..).unwrap_or_default();
            let have = left.len().min(4);
            word[..have].copy_from_slice(&left[..have]);
            word[have..].fill(0);
        }
    }
}

fn pack_elements(view: &CheckpointView<'_>, p: usize, rows: usize, codes: &mut [u8]) {
    let bytes = view.codes.element_bytes;
    for (s, step) in codes.chunks_exact_mut(STEP_BYTES).enumerate() {
        for (c, word) in step.chunks_exact_mut(4).enumerate().take(rows) {
            for (j, code) in word.chunks_exact_mut(bytes).enumerate() {
                let k = s * (4 / bytes) + j;
                if k < view.k {
                    code.copy_from_slice(view.codes.get(p * NR + c, k));
                }
            }
        }
    }
}

/// Overwrites the codes of padded channels and padded `k` by codes that decode to zero.
fn pad(code: CodeKind, k: usize, rows: usize, codes: &mut [u8]) {
    let zero = code.zero_word();
    let per_word = code.per_word();
    for (s, step) in codes.chunks_exact_mut(STEP_BYTES).enumerate() {
        for word in step[rows * 4..].chunks_exact_mut(4) {
            word.copy_from_slice(&zero.to_le_bytes());
        }
        let real = k.saturating_sub(s * per_word).min(per_word);
        if real < per_word {
            let keep = ((1u64 << (real * code.bits())) - 1) as u32;
            for word in step[..rows * 4].chunks_exact_mut(4) {
                let old = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                word.copy_from_slice(&((old & keep) | (zero & !keep)).to_le_bytes());
            }
        }
    }
}

/// Whether no code is NaN or infinite.
fn codes_finite(code: CodeKind, codes: &[u8]) -> bool {
    fn none<const B: usize>(codes: &[u8], bad: impl Fn([u8; B]) -> bool) -> bool {
        // Accumulated, not searched: the loop has no exit and becomes vector code.
        codes.chunks(4096).all(|chunk| {
            let (elements, _) = chunk.as_chunks::<B>();
            !elements.iter().fold(false, |any, e| any | bad(*e))
        })
    }
    match code {
        CodeKind::F32 => none::<4>(codes, |e| u32::from_le_bytes(e) & 0x7f80_0000 == 0x7f80_0000),
        CodeKind::Bf16 => none::<2>(codes, |e| u16::from_le_bytes(e) & 0x7f80 == 0x7f80),
        CodeKind::F16 => none::<2>(codes, |e| u16::from_le_bytes(e) & 0x7c00 == 0x7c00),
        CodeKind::E4m3 => none::<1>(codes, |[e]| e & 0x7f == 0x7f),
        CodeKind::I8 | CodeKind::U4 | CodeKind::E2m1 => true,
    }
}

fn find_bad_code(layout: &TileLayout, p: usize, panel: &[u8]) -> PackError {
    let kind = layout.code();
    let bytes = kind.bits() / 8;
    for row in 0..NR {
        for col in 0..layout.k() {
            let at = col / kind.per_word() * STEP_BYTES + row * 4 + col % kind.per_word() * bytes;
            let mut word = [0u8; 4];
            word[..bytes].copy_from_slice(&panel[at..at + bytes]);
            if !code::decode_word(kind, u32::from_le_bytes(word), 0).is_finite() {
                return PackError::NotFinite { part: "weight", row: p * NR + row, col };
            }
        }
    }
    unreachable!("called for a panel with a code that is not finite")
}
