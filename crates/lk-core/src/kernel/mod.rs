//! Kernels: one panel times a few rows, and the vector operations around them.
//!
//! What the layer uses:
//!
//! - [`Cpu::detect`](crate::simd::Cpu::detect), [`Cpu::capped`](crate::simd::Cpu::capped): what may run here.
//! - [`KernelSet::build`]`(format, &cpu, activation_dtype)`: the candidates for a weight format;
//!   [`KernelSet::measure`] fills the choice by rows, [`KernelSet::pin`] fixes one family;
//!   [`KernelSet::select`]`(m) -> &Kernel`.
//! - [`Kernel::run`]`(panel, &layout, &rows, out)`: `out[r][c] = Σ_k x[r][k] · w[c][k]` for `m` rows and the 32 channels
//!   of a panel; any `m ≥ 1`. [`Kernel::run2`] does a gate and an up panel that share their rows.
//! - [`Kernel::operand`] says what rows must be: f32, or bf16 as `u16` bits; a row has `layout.k_padded()` elements and its
//!   padding is zero. [`Rows::f32`] and [`Rows::bf16`] view a matrix, [`Rows::pick`] some rows of it.
//! - [`VecOps::get`]`(&cpu)`: conversions, weighted sums, reduction of partial results, and
//!   [`VecOps::activate`] with an [`Activation`].
//!
//! A kernel is data: a name, its family, the instruction set it needs, and a function. Everything that is generic (code,
//! ISA, rows in registers) is erased in the family modules.
#![expect(unsafe_code, reason = "kernels run on raw pointers; shapes are checked where arguments are built")]
#![allow(clippy::wildcard_imports, reason = "intrinsics are one vocabulary")]
#![allow(clippy::cast_ptr_alignment, reason = "vector loads and unaligned reads take any address")]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over register blocks index several arrays by constants"
)]
#![allow(clippy::missing_transmute_annotations, reason = "between vector types of one width")]

/// Repeats a body for `$i = 0 .. $n`, `$n` a constant of at most 8, with `$i` a constant in each copy.
macro_rules! unroll {
    ($i:ident < $n:expr, $body:block) => {
        unroll!(@ $i, $n, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $i:ident, $n:expr, $body:block, $($at:literal)*) => {
        $(if $at < $n {
            let $i: usize = $at;
            $body
        })*
    };
}

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_expanded;
#[cfg(target_arch = "x86_64")]
mod bf16_code;
#[cfg(target_arch = "x86_64")]
mod bf16_dot;
#[cfg(target_arch = "x86_64")]
mod expand;
mod f32_fma;
pub(crate) mod limits;
mod measure;
mod rows;
mod select;
mod vecops;

pub use activation::{Activation, ActivationFn, ActivationParams};
pub use rows::{Operand, Rows};
pub use select::KernelSet;
pub use vecops::{OutRow, VecOps};

use crate::format::WeightFormat;
use crate::simd::{Cpu, IsaLevel};
use crate::tile::{NR, TileLayout};
use crate::{Error, Result};

/// How a kernel multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// f32 operands and accumulators, fused multiply-add.
    F32Fma,
    /// bf16 operands, f32 accumulators, `vdpbf16ps`.
    Bf16Dot,
    /// bf16 operands, f32 accumulators, AMX tiles.
    Bf16Amx,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 3] = [Self::F32Fma, Self::Bf16Dot, Self::Bf16Amx];

    /// The name that `LVLLM_KERNEL` and kernel names use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32Fma => "f32fma",
            Self::Bf16Dot => "bf16dot",
            Self::Bf16Amx => "bf16amx",
        }
    }

    /// Inverse of [`Family::name`].
    ///
    /// # Errors
    ///
    /// [`Error::Config`] naming the value and all names.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name.trim()).ok_or_else(|| {
            let all: Vec<_> = Self::ALL.iter().map(|f| f.name()).collect();
            Error::Config(format!("LVLLM_KERNEL={name}: not a kernel family; use one of {}", all.join(", ")))
        })
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Arguments of one call, checked against each other by [`Kernel::run`].
pub(crate) struct TileArgs<'a> {
    /// First byte of the panel.
    panel: *const u8,
    layout: &'a TileLayout,
    rows: &'a Rows<'a>,
    /// `[m][32]` f32.
    out: *mut f32,
}

/// Computes a whole call.
///
/// # Safety
///
/// The CPU has the features of the kernel's ISA, and the arguments describe valid memory: a panel of the layout's size, rows
/// of at least `k_padded` elements of the kernel's operand type, and `m * 32` f32 of output.
pub(crate) type RunFn = unsafe fn(&TileArgs<'_>);

/// Computes `count` rows from `first` on, at most as many as the function has accumulators for; see [`RunFn`].
pub(crate) type BlockFn = unsafe fn(&TileArgs<'_>, first: usize, count: usize);

/// A block function and the rows that it has accumulators for. Fewer rows cost as much: the last one is repeated.
pub(crate) type Block = (usize, BlockFn);

/// One way to multiply a panel by rows.
#[derive(Debug, Clone)]
pub struct Kernel {
    name: String,
    family: Family,
    isa: IsaLevel,
    format: WeightFormat,
    operand: Operand,
    mr: usize,
    run: RunFn,
}

impl Kernel {
    fn new(
        family: Family,
        isa: IsaLevel,
        isa_name: &str,
        format: WeightFormat,
        operand: Operand,
        mr: usize,
        run: RunFn,
    ) -> Self {
        let name = format!("{family}-{isa_name}-{}-{mr}", format.code.name());
        Self { name, family, isa, format, operand, mr, run }
    }

    /// `{family}-{isa}-{code}-{mr}`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it multiplies.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The instruction-set level it needs.
    pub fn isa(&self) -> IsaLevel {
        self.isa
    }

    /// The weight format it was built for.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Element type of its rows.
    pub fn operand(&self) -> Operand {
        self.operand
    }

    /// Rows that share one pass over the weights' codes.
    pub fn mr(&self) -> usize {
        self.mr
    }

    /// `out[r * 32 + c] = Σ_k rows[r][k] · w[c][k]`, the scales applied; overwrites `rows.m() * 32` values of `out`.
    ///
    /// # Panics
    ///
    /// If the layout is not of the kernel's format, the panel has not the layout's size, the rows are not of the kernel's
    /// operand or shorter than `k_padded`, or `out` is too short.
    #[inline]
    pub fn run(&self, panel: &[u8], layout: &TileLayout, rows: &Rows<'_>, out: &mut [f32]) {
        assert_eq!(layout.format(), self.format, "{}: layout of another format", self.name);
        assert_eq!(panel.len(), layout.panel_bytes(), "{}: panel of another layout", self.name);
        assert_eq!(rows.operand(), self.operand, "{}: rows of another operand type", self.name);
        assert!(rows.width() >= layout.k_padded(), "{}: rows shorter than the padded k", self.name);
        assert!(out.len() >= rows.m() * NR, "{}: output too short", self.name);
        if rows.m() == 0 {
            return;
        }
        let args = TileArgs { panel: panel.as_ptr(), layout, rows, out: out.as_mut_ptr() };
        // SAFETY: kernels are only made from a `Cpu` that has the features, and the assertions above are the other half.
        unsafe { (self.run)(&args) }
    }

    /// A gate and an up panel of the same layout over the same rows; see [`Kernel::run`].
    ///
    /// # Panics
    ///
    /// As [`Kernel::run`].
    pub fn run2(&self, panels: [&[u8]; 2], layout: &TileLayout, rows: &Rows<'_>, out: [&mut [f32]; 2]) {
        let [gate, up] = out;
        self.run(panels[0], layout, rows, gate);
        self.run(panels[1], layout, rows, up);
    }
}

/// Every kernel for `format` that `cpu` can run, poorest ISA first.
fn candidates(format: WeightFormat, cpu: Cpu) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    f32_fma::kernels(format, cpu, &mut kernels);
    #[cfg(target_arch = "x86_64")]
    {
        bf16_dot::kernels(format, cpu, &mut kernels);
        amx::kernels(format, cpu, &mut kernels);
        amx_expanded::kernels(format, cpu, &mut kernels);
    }
    kernels
}

/// Covers `m` rows by blocks of nearly equal size, each done by the smallest entry of `table` (ascending) that holds it.
///
/// # Safety
///
/// As [`RunFn`].
#[inline(always)]
unsafe fn run_blocks(args: &TileArgs<'_>, table: &[Block]) {
    let m = args.rows.m();
    let blocks = m.div_ceil(table[table.len() - 1].0);
    let mut first = 0;
    for b in 0..blocks {
        let end = (b + 1) * m / blocks;
        let count = end - first;
        let block = table.iter().find(|b| b.0 >= count).expect("the last entry holds the largest block").1;
        // SAFETY: the caller's promise; the block stays within the m rows.
        unsafe { block(args, first, count) };
        first = end;
    }
}
