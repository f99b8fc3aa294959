//! Scalar decoders of single codes and scales, straight from their definitions.

use super::{CodeKind, ScaleKind};
use half::{bf16, f16};

/// `e4m3fn`: sign, 4 exponent bits (bias 7), 3 mantissa bits; `0x7F` and `0xFF` are NaN, there is no infinity.
pub fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = code & 0x7f;
    let exponent = i32::from(magnitude >> 3);
    let mantissa = f32::from(magnitude & 7);
    let value = if magnitude == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa * (-9f32).exp2()
    } else {
        (8.0 + mantissa) * ((exponent - 10) as f32).exp2()
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// The eight magnitudes of `e2m1`; bit 3 of a code is the sign.
pub const E2M1_MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// `e2m1`: the low four bits of `code`; code 8 is negative zero.
pub fn e2m1_to_f32(code: u8) -> f32 {
    let value = E2M1_MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { value } else { -value }
}

/// `e8m0`: `2^(code - 127)`; 0 is the subnormal `2^-127`, 255 is NaN.
pub fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        b => f32::from_bits(u32::from(b) << 23),
    }
}

/// Code `j` of a 32-bit panel word as a number, without scale and zero point.
pub fn decode_word(kind: CodeKind, word: u32, j: usize) -> f32 {
    let bits = kind.bits();
    let code = (word >> (j * bits % 32)) as u64 & ((1u64 << bits) - 1);
    match kind {
        CodeKind::F32 => f32::from_bits(code as u32),
        CodeKind::Bf16 => bf16::from_bits(code as u16).to_f32(),
        CodeKind::F16 => f16::from_bits(code as u16).to_f32(),
        CodeKind::E4m3 => e4m3_to_f32(code as u8),
        CodeKind::I8 => f32::from(code as u8 as i8),
        CodeKind::U4 => code as f32 - 8.0,
        CodeKind::E2m1 => e2m1_to_f32(code as u8),
    }
}

/// The scale at the start of `bytes`.
pub fn decode_scale(kind: ScaleKind, bytes: &[u8]) -> f32 {
    match kind {
        ScaleKind::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        ScaleKind::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleKind::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleKind::E4m3 => e4m3_to_f32(bytes[0]),
        ScaleKind::E8m0 => e8m0_to_f32(bytes[0]),
    }
}
