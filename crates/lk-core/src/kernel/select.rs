//! Which kernel does how many rows.

use super::{Family, Kernel, candidates};
use crate::format::WeightFormat;
use crate::simd::Cpu;
use crate::{Dtype, Error, Result};

/// Row counts with an entry of their own; more rows share the last entry.
const TABLE_ROWS: usize = 16;

/// The kernels for one weight format on this CPU and the choice among them by rows.
#[derive(Debug, Clone)]
pub struct KernelSet {
    kernels: Vec<Kernel>,
    /// Kernel by rows: 1 to 16, then more.
    choice: [u8; TABLE_ROWS + 1],
}

impl KernelSet {
    /// The kernels that may compute `format` for activations of `activation`: families with bf16 rows only for bf16
    /// activations, which they do not round. Until measured, the richest f32 kernel is chosen for all rows.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedFormat`] if no kernel computes the format, or the activation is no float.
    pub fn build(format: WeightFormat, cpu: Cpu, activation: Dtype) -> Result<Self> {
        format.validate()?;
        if !matches!(activation, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
            return Err(Error::UnsupportedFormat(format!(
                "activations of dtype {activation}; use f32, bf16 or f16"
            )));
        }
        let mut kernels = Vec::<Kernel>::new();
        for kernel in candidates(format, cpu) {
            if kernel.family() != Family::F32Fma && activation != Dtype::Bf16 {
                continue;
            }
            // Candidates come poorest ISA first: the last one of a family stays.
            match kernels.iter_mut().find(|k| k.family() == kernel.family()) {
                Some(slot) => *slot = kernel,
                None => kernels.push(kernel),
            }
        }
        if kernels.is_empty() {
            return Err(Error::UnsupportedFormat(format!("no kernel computes {format} weights")));
        }
        Ok(Self { kernels, choice: [0; TABLE_ROWS + 1] })
    }

    /// Every kernel for `format` that `cpu` can run, of all instruction sets and families: the table that tests walk.
    pub fn all(format: WeightFormat, cpu: Cpu) -> Vec<Kernel> {
        candidates(format, cpu)
    }

    /// The candidates.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The kernel for `m` rows.
    #[inline]
    pub fn select(&self, m: usize) -> &Kernel {
        &self.kernels[usize::from(self.choice[m.clamp(1, TABLE_ROWS + 1) - 1])]
    }

    /// Index of the kernel for `m` rows.
    pub(super) fn choice(&self, m: usize) -> usize {
        usize::from(self.choice[m.clamp(1, TABLE_ROWS + 1) - 1])
    }

    /// Makes kernel `index` the choice for `rows`.
    pub(super) fn choose(&mut self, rows: std::ops::RangeInclusive<usize>, index: usize) {
        let first = (*rows.start()).clamp(1, TABLE_ROWS + 1);
        for m in first..=(*rows.end()).min(TABLE_ROWS + 1) {
            self.choice[m - 1] = index as u8;
        }
    }

    /// Chooses one family for all rows (`LVLLM_KERNEL`).
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the family has no kernel here; names those that have.
    pub fn pin(&mut self, family: Family) -> Result<()> {
        let Some(i) = self.kernels.iter().position(|k| k.family() == family) else {
            let have: Vec<_> = self.kernels.iter().map(|k| k.family().name()).collect();
            return Err(Error::Config(format!(
                "LVLLM_KERNEL={family} has no kernel for this format, activation dtype and CPU; available: {}",
                have.join(", ")
            )));
        };
        self.choice = [i as u8; TABLE_ROWS + 1];
        Ok(())
    }
}
