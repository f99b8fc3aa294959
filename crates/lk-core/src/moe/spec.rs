//! What a MoE layer is: shapes, format, activation.

use crate::format::{CodeKind, WeightFormat};
use crate::kernel::Activation;
use crate::{Dtype, Error, Result};

/// Everything that the engine must know of a layer before its first weight arrives.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of a model")]
pub struct LayerSpec {
    /// Name in messages, as the server calls the layer (`model.layers.3.mlp.experts`).
    pub name: String,
    /// Format of w13 and w2.
    pub format: WeightFormat,
    /// Experts held by this process.
    pub num_experts: usize,
    /// Width that the experts see (a latent width where the model projects first).
    pub hidden_size: usize,
    /// Width between w13 and w2, this process's tensor-parallel share.
    pub intermediate_size: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Dtype of `hidden_states` and of the output: f32, bf16 or f16.
    pub dtype: Dtype,
    /// Activation with its parameters.
    pub activation: Activation,
    /// Whether gate and up rows of w13 alternate (gpt-oss) instead of lying in halves.
    pub interleaved: bool,
    /// Whether w13 has a bias.
    pub w13_bias: bool,
    /// Whether w2 has a bias.
    pub w2_bias: bool,
    /// Whether the router weight multiplies the input of the expert instead of its output (needs top-1).
    pub router_weight_on_input: bool,
}

impl LayerSpec {
    /// Number of matrices in w13: 2 with a gate, 1 without.
    pub fn w13_shards(&self) -> usize {
        if self.activation.gated { 2 } else { 1 }
    }

    /// Consecutive columns of w2 that share a scale; 1 where slices may be cut anywhere.
    pub fn k_group(&self) -> usize {
        self.format.scale.map_or(1, |scale| (scale.group as usize).max(1))
    }

    /// Dtype of the weight tensors, or `None` for packed codes.
    pub fn tensor_dtype(&self) -> Option<Dtype> {
        match self.format.code {
            CodeKind::F32 => Some(Dtype::F32),
            CodeKind::Bf16 => Some(Dtype::Bf16),
            CodeKind::F16 => Some(Dtype::F16),
            _ => None,
        }
    }

    /// Checks the numbers against each other.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::UnsupportedFormat`] naming the layer and the numbers.
    pub fn validate(&self) -> Result<()> {
        let fail = |what: String| Err(Error::Shape(format!("{}: {what}", self.name)));
        for (name, value) in [
            ("num_experts", self.num_experts),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("top_k", self.top_k),
        ] {
            if value == 0 || value > 1 << 24 {
                return fail(format!("{name} {value} is not in 1..=16777216"));
            }
        }
        if !matches!(self.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
            return fail(format!("activations of dtype {} are not one of f32, bf16, f16", self.dtype));
        }
        if self.router_weight_on_input && self.top_k != 1 {
            return fail(format!(
                "the router weight multiplies the input only with top_k 1, not {}: unset router_weight_on_input",
                self.top_k
            ));
        }
        if self.interleaved && !self.activation.gated {
            return fail("interleaved gate/up rows need a gated activation".to_owned());
        }
        Ok(())
    }
}
