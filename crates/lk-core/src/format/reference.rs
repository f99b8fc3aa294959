//! Scalar decoding of packed matrices: the oracle of kernels and packing.

use super::GlobalScale;
use super::code::{decode_scale, decode_word};
use crate::tile::{NR, STEP_BYTES, TileLayout};

/// The matrix `[n, k]` as f32, each weight rounded as the format's equation says: `(code - zero) * scale` in f32, then the
/// matrix's scale. Where a format has both scales, `code * (scale * global)` (the order of `ModelOpt`), or for the dividing form
/// `code * scale / global`.
pub fn decode(layout: &TileLayout, packed: &[u8]) -> Vec<f32> {
    let mut out = Vec::with_capacity(layout.n() * layout.k());
    for row in 0..layout.n() {
        let panel = layout.panel(packed, row / NR);
        out.extend((0..layout.k()).map(|k| decode_one(layout, panel, row % NR, k)));
    }
    out
}

/// Weight `(c, k)` of one panel.
pub fn decode_one(layout: &TileLayout, panel: &[u8], c: usize, k: usize) -> f32 {
    let format = layout.format();
    let per_word = format.code.per_word();
    let at = k / per_word * STEP_BYTES + c * 4;
    let word = u32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]]);
    let mut value = decode_word(format.code, word, k % per_word);
    let group = if format.act_order {
        let i = layout.index_offset() + 2 * k;
        usize::from(u16::from_le_bytes([panel[i], panel[i + 1]]))
    } else {
        layout.group_of(k)
    };
    if format.zero_point {
        value -= f32::from(panel[layout.zero_offset() + group * NR + c] as i8);
    }
    let scale = format.scale.map(|s| {
        let i = group * layout.scale_channels() + c % layout.scale_channels();
        decode_scale(s.kind, &panel[layout.scale_offset() + i * s.kind.bytes()..])
    });
    let g = layout.global_offset();
    let global = || f32::from_le_bytes([panel[g], panel[g + 1], panel[g + 2], panel[g + 3]]);
    match (scale, format.global) {
        (None, GlobalScale::None) => value,
        (None, GlobalScale::Multiply) => value * global(),
        (None, GlobalScale::Divide) => value / global(),
        (Some(s), GlobalScale::None) => value * s,
        (Some(s), GlobalScale::Multiply) => value * (s * global()),
        (Some(s), GlobalScale::Divide) => value * s / global(),
    }
}
