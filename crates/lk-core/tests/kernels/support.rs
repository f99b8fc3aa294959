//! Random matrices in the panel layout, and small numeric helpers of the tests.
#![allow(dead_code, reason = "each test target uses its own part")]

use half::{bf16, f16};
use lk_core::format::{CodeKind, GlobalScale, ScaleKind, WeightFormat};
use lk_core::tile::{NR, STEP_BYTES, TileLayout};

/// A small deterministic generator (xorshift64*).
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Uniform in -1 .. 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() & 0xff_ffff) as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }
}

/// The code of a random weight of ordinary size.
fn code(kind: CodeKind, rng: &mut Rng) -> u32 {
    match kind {
        CodeKind::F32 => rng.unit().to_bits(),
        CodeKind::Bf16 => u32::from(bf16::from_f32(rng.unit()).to_bits()),
        CodeKind::F16 => u32::from(f16::from_f32(rng.unit()).to_bits()),
        CodeKind::E4m3 => match rng.bits() as u32 & 0xff {
            0x7f | 0xff => 0,
            c => c,
        },
        CodeKind::I8 => rng.bits() as u32 & 0xff,
        CodeKind::U4 | CodeKind::E2m1 => rng.bits() as u32 & 0xf,
    }
}

fn scale(kind: ScaleKind, rng: &mut Rng, out: &mut [u8]) {
    let value = 0.002 * (1.5 + rng.unit());
    match kind {
        ScaleKind::F32 => out.copy_from_slice(&value.to_le_bytes()),
        ScaleKind::Bf16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        ScaleKind::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        ScaleKind::E4m3 => out[0] = rng.below(0x7f) as u8,
        ScaleKind::E8m0 => out[0] = 112 + rng.below(12) as u8,
    }
}

/// A packed matrix of random codes and scales, padded as packing pads.
pub(crate) fn random_packed(layout: &TileLayout, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut packed = vec![0u8; layout.bytes()];
    let format = layout.format();
    let (bits, per_word) = (format.code.bits(), format.code.per_word());
    for (p, panel) in packed.chunks_exact_mut(layout.panel_bytes()).enumerate() {
        for (s, step) in panel[..layout.scale_offset()].chunks_exact_mut(STEP_BYTES).enumerate() {
            for (c, word) in step.chunks_exact_mut(4).enumerate() {
                let mut w = u64::from(format.code.zero_word());
                for j in 0..per_word {
                    if p * NR + c < layout.n() && s * per_word + j < layout.k() {
                        let mask = ((1u64 << bits) - 1) << (j * bits);
                        w = (w & !mask) | (u64::from(code(format.code, &mut rng)) << (j * bits));
                    }
                }
                word.copy_from_slice(&(w as u32).to_le_bytes());
            }
        }
        if let Some(s) = format.scale {
            let count = layout.groups() * layout.scale_channels();
            for i in 0..count {
                let at = layout.scale_offset() + i * s.kind.bytes();
                scale(s.kind, &mut rng, &mut panel[at..at + s.kind.bytes()]);
            }
        }
        if format.zero_point {
            let (range, half) = if format.code == CodeKind::U4 { (16, 8) } else { (256, 128) };
            let zeros = &mut panel[layout.zero_offset()..][..layout.groups() * NR];
            for (_, zero) in zeros.iter_mut().enumerate().filter(|(i, _)| p * NR + i % NR < layout.n()) {
                *zero = (rng.below(range) as i32 - half) as i8 as u8;
            }
        }
        if format.act_order {
            for index in panel[layout.index_offset()..][..2 * layout.k_padded()].chunks_exact_mut(2) {
                index.copy_from_slice(&(rng.below(layout.groups()) as u16).to_le_bytes());
            }
        }
        if format.global != GlobalScale::None {
            let value: f32 = if format.global == GlobalScale::Multiply { 0.0037 } else { 271.3 };
            panel[layout.global_offset()..][..4].copy_from_slice(&value.to_le_bytes());
        }
    }
    packed
}

/// Formats that the kernel table walks; one of each kind, odd groups included.
pub(crate) fn formats() -> Vec<WeightFormat> {
    use CodeKind::{E2m1, E4m3};
    use ScaleKind::{Bf16, E8m0, F16, F32};
    vec![
        WeightFormat::F32,
        WeightFormat::BF16,
        WeightFormat::F16,
        WeightFormat::FP8_TENSOR,
        WeightFormat::fp8_channel(F32),
        WeightFormat::fp8_channel(Bf16),
        WeightFormat::fp8_block(F32, 128, 128),
        WeightFormat::fp8_block(Bf16, 128, 128),
        WeightFormat::fp8_block(E8m0, 128, 128),
        WeightFormat::fp8_block(F32, 32, 32),
        WeightFormat::scaled(E4m3, F32, 64, 1),
        WeightFormat::MXFP8,
        WeightFormat::int8(F32, 0, false),
        WeightFormat::int8(Bf16, 128, false),
        WeightFormat::int8(F16, 64, true),
        WeightFormat::int4(Bf16, 32, false),
        WeightFormat::int4(Bf16, 128, false),
        WeightFormat::int4(F16, 0, false),
        WeightFormat::int4(F32, 32, false),
        WeightFormat::int4(F16, 128, true),
        WeightFormat::int4(Bf16, 0, true),
        WeightFormat::int4(F16, 32, true).with_act_order(),
        WeightFormat::int8(F16, 64, false).with_act_order(),
        WeightFormat::MXFP4,
        WeightFormat::NVFP4,
        WeightFormat::NVFP4_DIVIDE,
        WeightFormat::scaled(E2m1, Bf16, 64, 1),
    ]
}
