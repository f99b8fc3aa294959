//! Panels back to rows: the inverse of packing, for tests and for copies that leave the engine.

use super::{NR, STEP_BYTES, TileLayout};

/// A matrix in row-major order, as raw bytes of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// Codes `[n, k]`: a bit stream per row, padded to a whole byte.
    pub codes: Vec<u8>,
    /// Scales `[n, groups]` (one row for each channel, also where a block shares them); empty without scales.
    pub scales: Vec<u8>,
    /// Zero points `[n, groups]` minus half the code's range; empty without zero points.
    pub zeros: Vec<i8>,
}

/// Gives back the codes, scales and zero points of a packed matrix, without the padding.
pub fn unpack(layout: &TileLayout, packed: &[u8]) -> Unpacked {
    let (n, k, bits) = (layout.n(), layout.k(), layout.code().bits());
    let row_bytes = (k * bits).div_ceil(8);
    let groups = if layout.groups() == 0 { 0 } else { layout.group_of(k - 1) + 1 };
    let scale_bytes = layout.format().scale.map_or(0, |s| s.kind.bytes());
    let mut out = Unpacked { codes: vec![0; n * row_bytes], scales: Vec::new(), zeros: Vec::new() };
    for (row, codes) in out.codes.chunks_exact_mut(row_bytes).enumerate() {
        let (panel, c) = (layout.panel(packed, row / NR), row % NR);
        for (s, word) in codes.chunks_mut(4).enumerate() {
            let at = s * STEP_BYTES + c * 4;
            word.copy_from_slice(&panel[at..at + word.len()]);
        }
        if k * bits % 8 != 0 {
            codes[row_bytes - 1] &= (1 << (k * bits % 8)) - 1;
        }
        for g in 0..groups {
            let i = g * layout.scale_channels() + c % layout.scale_channels();
            out.scales.extend_from_slice(&panel[layout.scale_offset() + i * scale_bytes..][..scale_bytes]);
            if layout.format().zero_point {
                out.zeros.push(panel[layout.zero_offset() + g * NR + c] as i8);
            }
        }
    }
    out
}
