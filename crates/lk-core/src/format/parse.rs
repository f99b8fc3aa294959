//! Names of formats, as configuration passes them.

use super::{CodeKind, GlobalScale, GroupScale, ScaleKind, WeightFormat};
use crate::{Error, Result};

impl WeightFormat {
    /// Inverse of the format's `Display`: the code, then `-`-separated parts: `channel`, `gN` (k per scale) or `NxM` (channels
    /// by k per scale) followed by the scale's encoding, `zp`, `global` or `globaldiv`, `actorder`. `mxfp4`, `mxfp8`, `nvfp4`,
    /// `nvfp4-div` and `fp8-tensor` are short for the formats of those names.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedFormat`] naming the text.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "mxfp4" => return Ok(Self::MXFP4),
            "mxfp8" => return Ok(Self::MXFP8),
            "nvfp4" => return Ok(Self::NVFP4),
            "nvfp4-div" => return Ok(Self::NVFP4_DIVIDE),
            "fp8-tensor" => return Ok(Self::FP8_TENSOR),
            _ => {}
        }
        let refuse = |why: &str| Error::UnsupportedFormat(format!("weight format {name:?}: {why}"));
        let mut parts = name.split('-');
        let code = parts.next().unwrap_or_default();
        let code = CodeKind::ALL
            .into_iter()
            .find(|c| c.name() == code)
            .ok_or_else(|| refuse("the code is none of f32, bf16, f16, e4m3, i8, u4, e2m1"))?;
        let mut format =
            Self { code, scale: None, zero_point: false, global: GlobalScale::None, act_order: false };
        while let Some(part) = parts.next() {
            match part {
                "zp" => format.zero_point = true,
                "global" => format.global = GlobalScale::Multiply,
                "globaldiv" => format.global = GlobalScale::Divide,
                "actorder" => format.act_order = true,
                _ => {
                    let (rows, group) =
                        span(part).ok_or_else(|| refuse(&format!("unknown part {part:?}")))?;
                    let kinds =
                        [ScaleKind::F32, ScaleKind::Bf16, ScaleKind::F16, ScaleKind::E4m3, ScaleKind::E8m0];
                    let kind = parts.next().and_then(|p| kinds.into_iter().find(|k| k.name() == p));
                    let kind = kind.ok_or_else(|| refuse("a scale is f32, bf16, f16, e4m3 or e8m0"))?;
                    format.scale = Some(GroupScale { kind, group, rows });
                }
            }
        }
        format.validate()?;
        Ok(format)
    }
}

/// `(channels, k)` per scale.
fn span(part: &str) -> Option<(u32, u32)> {
    if part == "channel" {
        return Some((1, 0));
    }
    if let Some(rows) = part.strip_prefix("rows") {
        return Some((rows.parse().ok()?, 0));
    }
    if let Some(group) = part.strip_prefix('g') {
        return Some((1, group.parse().ok()?));
    }
    let (rows, group) = part.split_once('x')?;
    Some((rows.parse().ok()?, group.parse().ok()?))
}
