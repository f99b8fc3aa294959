//! Activation functions of expert layers, on vectors.
//!
//! Names and formulas are those of vLLM's `fused_moe/activation.py`. NaN survives every clamp: `min` and `max` return their
//! second operand if either is NaN, so that the value stands second.

use crate::simd::F32Isa;
use crate::{Error, Result};

/// What is computed from a gate value `g` and an up value `u`. σ is the logistic function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ActivationFn {
    /// `g' σ(g') u'` with `g' = min(g, limit)` and `u' = clamp(u, ±limit)`; an infinite limit clamps nothing.
    Silu {
        /// Bound, `f32::INFINITY` for none.
        limit: f32,
    },
    /// `min(g σ(g), limit) · clamp(u, ±limit)`: the clamp comes after the product.
    SwigluStep {
        /// Bound.
        limit: f32,
    },
    /// `g' σ(alpha g') (u' + beta)` with `g' = min(g, limit)`, `u' = clamp(u, ±limit)`.
    SwigluOai {
        /// Slope inside of σ.
        alpha: f32,
        /// Bound.
        limit: f32,
        /// Added to up.
        beta: f32,
    },
    /// `g Φ(g) u` with the normal distribution function Φ.
    Gelu,
    /// The tanh approximation of [`ActivationFn::Gelu`].
    GeluTanh,
    /// `max(g, 0)² u`.
    Relu2,
    /// `beta tanh(g / beta) σ(g) · linear_beta tanh(u / linear_beta)`.
    Situ {
        /// Saturation of the gate.
        beta: f32,
        /// Saturation of up.
        linear_beta: f32,
    },
}

/// An activation function and whether it has an up operand; without one the formulas above hold with `u = 1`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Activation {
    /// The function.
    pub function: ActivationFn,
    /// Gate and up matrices, or one matrix only.
    pub gated: bool,
}

/// Optional parameters of a model's configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ActivationParams {
    /// `swiglu_limit`.
    pub limit: Option<f32>,
    /// `alpha` of swigluoai.
    pub alpha: Option<f32>,
    /// `beta` of swigluoai and situ.
    pub beta: Option<f32>,
    /// `linear_beta` of situ.
    pub linear_beta: Option<f32>,
}

impl Activation {
    /// `silu(gate) * up`.
    pub const SILU: Self = Self { function: ActivationFn::Silu { limit: f32::INFINITY }, gated: true };

    /// The activation of a vLLM name (`silu`, `gelu`, `gelu_tanh`, `swigluoai`, `swigluoai_uninterleave`, `swiglustep`,
    /// `relu2`, `situ`; `_no_mul` behind a name means no up matrix) and a model's parameters.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedFormat`] for another name, [`Error::Config`] for a parameter that is not a positive number.
    pub fn parse(name: &str, params: ActivationParams) -> Result<Self> {
        let (base, gated) = match name.strip_suffix("_no_mul") {
            Some(base) => (base, false),
            None => (name, true),
        };
        let positive = |what: &str, value: Option<f32>, default: f32| match value {
            None => Ok(default),
            Some(v) if v > 0.0 => Ok(v),
            Some(v) => Err(Error::Config(format!("activation {name}: {what} = {v} must be positive"))),
        };
        let function = match base {
            "silu" | "swish" => ActivationFn::Silu { limit: positive("limit", params.limit, f32::INFINITY)? },
            "swiglustep" => ActivationFn::SwigluStep { limit: positive("limit", params.limit, 7.0)? },
            "swigluoai" | "swigluoai_uninterleave" => ActivationFn::SwigluOai {
                alpha: positive("alpha", params.alpha, 1.702)?,
                limit: positive("limit", params.limit, 7.0)?,
                beta: params.beta.unwrap_or(1.0),
            },
            "gelu" => ActivationFn::Gelu,
            "gelu_tanh" | "gelu_pytorch_tanh" => ActivationFn::GeluTanh,
            "relu2" => ActivationFn::Relu2,
            "situ" => ActivationFn::Situ {
                beta: positive("beta", params.beta, 4.0)?,
                linear_beta: positive("linear_beta", params.linear_beta, 25.0)?,
            },
            _ => {
                return Err(Error::UnsupportedFormat(format!(
                    "activation {name}; known are silu, gelu, gelu_tanh, swigluoai, swiglustep, relu2 and situ, each also \
                     with _no_mul"
                )));
            }
        };
        Ok(Self { function, gated })
    }
}

/// `e^x`, within two units in the last place between the bounds of its exponent; saturates beyond.
///
/// # Safety
///
/// The CPU has the ISA's features; so for all functions of this file.
#[inline(always)]
unsafe fn exp<I: F32Isa>(x: I::F) -> I::F {
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the upper exact in a product with n.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // SAFETY: the caller's promise.
    unsafe {
        let x = I::min(I::splat(88.376_26), x);
        let x = I::max(I::splat(-87.336_54), x);
        let n = I::round_i32(I::mul(x, I::splat(std::f32::consts::LOG2_E)));
        let nf = I::from_i32(n);
        let r = I::fma(nf, I::splat(-LN2_HIGH), x);
        let r = I::fma(nf, I::splat(-LN2_LOW), r);
        let mut p = I::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
            p = I::fma(p, r, I::splat(c));
        }
        let p = I::add(I::fma(p, I::mul(r, r), r), I::splat(1.0));
        let power = I::shl(I::add_words(n, I::splat_word(127)), 23);
        I::mul(p, I::as_f32(power))
    }
}

/// `1 / (1 + e^-x)` times `y`.
#[inline(always)]
unsafe fn sigmoid_times<I: F32Isa>(x: I::F, y: I::F) -> I::F {
    // SAFETY: the caller's promise.
    unsafe {
        let e = exp::<I>(I::sub(I::zero(), x));
        I::div(y, I::add(I::splat(1.0), e))
    }
}

/// Magnitude and sign bit.
#[inline(always)]
unsafe fn split_sign<I: F32Isa>(x: I::F) -> (I::F, I::W) {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = I::as_words(x);
        let magnitude = I::as_f32(I::and_words(bits, I::splat_word(0x7fff_ffff)));
        (magnitude, I::and_words(bits, I::splat_word(0x8000_0000)))
    }
}

#[inline(always)]
unsafe fn tanh<I: F32Isa>(x: I::F) -> I::F {
    // SAFETY: the caller's promise.
    unsafe {
        // An odd polynomial near zero, where 1 - 2 / (e^2x + 1) loses all digits.
        let z = I::mul(x, x);
        let mut p = I::splat(-5.704_988_7e-3);
        for c in [2.063_909e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_8] {
            p = I::fma(p, z, I::splat(c));
        }
        let near = I::fma(I::mul(p, z), x, x);
        let (magnitude, sign) = split_sign::<I>(x);
        let e = exp::<I>(I::add(magnitude, magnitude));
        let far = I::sub(I::splat(1.0), I::div(I::splat(2.0), I::add(e, I::splat(1.0))));
        let far = I::as_f32(I::or_words(I::as_words(far), sign));
        I::select(I::lt(magnitude, I::splat(0.625)), near, far)
    }
}

/// Normal distribution function times `y`.
#[inline(always)]
unsafe fn normal_cdf_times<I: F32Isa>(x: I::F, y: I::F) -> I::F {
    // erfc(z) = t e^(-z² + P(t)) with t = 1 / (1 + z/2), a Chebyshev fit with 1.2e-7 of relative error for z >= 0.
    const P: [f32; 9] = [
        -0.822_152_3,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ];
    // SAFETY: the caller's promise.
    unsafe {
        let (magnitude, _) = split_sign::<I>(x);
        let z = I::mul(magnitude, I::splat(std::f32::consts::FRAC_1_SQRT_2));
        let t = I::div(I::splat(1.0), I::fma(z, I::splat(0.5), I::splat(1.0)));
        let mut p = I::splat(0.170_872_77);
        for c in P {
            p = I::fma(p, t, I::splat(c));
        }
        let half_square = I::mul(I::mul(x, x), I::splat(0.5));
        let tail = I::mul(I::mul(I::splat(0.5), t), exp::<I>(I::sub(p, half_square)));
        // exp saturates instead of reaching zero; NaN goes on.
        let tail = I::select(I::lt(I::splat(13.0), magnitude), I::zero(), tail);
        let cdf = I::select(I::lt(x, I::zero()), tail, I::sub(I::splat(1.0), tail));
        I::mul(cdf, y)
    }
}

/// One vector of gate and up values; `up` is 1 where there is no up matrix.
#[inline(always)]
pub(super) unsafe fn activate<I: F32Isa>(function: ActivationFn, gate: I::F, up: I::F) -> I::F {
    // SAFETY: the caller's promise.
    unsafe {
        let clamp = |limit: f32, x: I::F| I::max(I::splat(-limit), I::min(I::splat(limit), x));
        match function {
            ActivationFn::Silu { limit } => {
                let g = I::min(I::splat(limit), gate);
                I::mul(sigmoid_times::<I>(g, g), clamp(limit, up))
            }
            ActivationFn::SwigluStep { limit } => {
                let g = I::min(I::splat(limit), sigmoid_times::<I>(gate, gate));
                I::mul(g, clamp(limit, up))
            }
            ActivationFn::SwigluOai { alpha, limit, beta } => {
                let g = I::min(I::splat(limit), gate);
                let u = I::add(clamp(limit, up), I::splat(beta));
                I::mul(sigmoid_times::<I>(I::mul(g, I::splat(alpha)), g), u)
            }
            ActivationFn::Gelu => I::mul(normal_cdf_times::<I>(gate, gate), up),
            ActivationFn::GeluTanh => {
                // (1 + tanh y) / 2 = σ(2y)
                const SCALE: f32 = 2.0 * 0.797_884_6;
                let cube = I::mul(I::mul(gate, gate), gate);
                let y = I::mul(I::fma(cube, I::splat(0.044_715), gate), I::splat(SCALE));
                I::mul(sigmoid_times::<I>(y, gate), up)
            }
            ActivationFn::Relu2 => {
                let g = I::max(I::zero(), gate);
                I::mul(I::mul(g, g), up)
            }
            ActivationFn::Situ { beta, linear_beta } => {
                let g = I::mul(tanh::<I>(I::div(gate, I::splat(beta))), I::splat(beta));
                let u = I::mul(tanh::<I>(I::div(up, I::splat(linear_beta))), I::splat(linear_beta));
                I::mul(sigmoid_times::<I>(gate, g), u)
            }
        }
    }
}
