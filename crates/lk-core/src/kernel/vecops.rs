//! Vector operations around the kernels, one table of functions per ISA.

use super::activation::{Activation, ActivationFn, activate};
use crate::simd::scalar::Scalar;
use crate::simd::{Cpu, F32Isa};

/// A row of results in the dtype that the caller wants.
#[derive(Debug)]
pub enum OutRow<'a> {
    /// f32.
    F32(&'a mut [f32]),
    /// bf16 bits.
    Bf16(&'a mut [u16]),
    /// f16 bits.
    F16(&'a mut [u16]),
}

impl OutRow<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(row) => row.len(),
            Self::Bf16(row) | Self::F16(row) => row.len(),
        }
    }
}

/// Elementwise operations compiled for one ISA. All slices may have any length and alignment.
#[derive(Debug)]
pub struct VecOps {
    name: &'static str,
    bf16_to_f32: unsafe fn(&[u16], &mut [f32]),
    f16_to_f32: unsafe fn(&[u16], &mut [f32]),
    f32_to_bf16: unsafe fn(&[f32], &mut [u16]),
    f32_to_f16: unsafe fn(&[f32], &mut [u16]),
    axpy: unsafe fn(f32, &[f32], &mut [f32]),
    scale: unsafe fn(f32, &mut [f32]),
    add: unsafe fn(&[f32], &mut [f32]),
    reduce: unsafe fn(&[&[f32]], OutRow<'_>),
    activate: unsafe fn(&Activation, &[f32], &[f32], &mut [f32]),
}

impl VecOps {
    /// The operations of the richest ISA of `cpu`.
    pub fn get(cpu: Cpu) -> &'static Self {
        #[cfg(target_arch = "x86_64")]
        {
            if cpu.avx512() {
                return &x86::AVX512;
            }
            if cpu.avx2() {
                return &x86::AVX2;
            }
        }
        let _ = cpu;
        &SCALAR
    }

    /// Name of the ISA.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Widens bf16 bits. Panics if the lengths differ; so do all functions here.
    pub fn bf16_to_f32(&self, src: &[u16], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len());
        // SAFETY: `get` hands out a table only for a CPU with its features; so in all functions here.
        unsafe { (self.bf16_to_f32)(src, dst) }
    }

    /// Widens f16 bits.
    pub fn f16_to_f32(&self, src: &[u16], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len());
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.f16_to_f32)(src, dst) }
    }

    /// Rounds to bf16, nearest even.
    pub fn f32_to_bf16(&self, src: &[f32], dst: &mut [u16]) {
        assert_eq!(src.len(), dst.len());
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.f32_to_bf16)(src, dst) }
    }

    /// Rounds to f16, nearest even; beyond its range becomes infinite.
    pub fn f32_to_f16(&self, src: &[f32], dst: &mut [u16]) {
        assert_eq!(src.len(), dst.len());
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.f32_to_f16)(src, dst) }
    }

    /// `y += w * t`.
    pub fn axpy(&self, w: f32, t: &[f32], y: &mut [f32]) {
        assert_eq!(t.len(), y.len());
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.axpy)(w, t, y) }
    }

    /// `y *= w`.
    pub fn scale(&self, w: f32, y: &mut [f32]) {
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.scale)(w, y) }
    }

    /// `y += t`.
    pub fn add(&self, t: &[f32], y: &mut [f32]) {
        assert_eq!(t.len(), y.len());
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.add)(t, y) }
    }

    /// Sum of `parts` (added in their order in f32), rounded once to the dtype of `out`. No parts give zeros.
    pub fn reduce(&self, parts: &[&[f32]], out: OutRow<'_>) {
        assert!(parts.iter().all(|p| p.len() == out.len()));
        // SAFETY: see `bf16_to_f32`.
        unsafe { (self.reduce)(parts, out) }
    }

    /// `out = act(gate, up)` elementwise. Without an up matrix (`!act.gated`) the only projection is `gate`, and `up` is
    /// not read.
    pub fn activate(&self, act: &Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert_eq!(gate.len(), out.len());
        assert!(!act.gated || up.len() == out.len());
        let whole = out.len() / MAX_LANES * MAX_LANES;
        let up = if act.gated { up } else { gate };
        // SAFETY: see `bf16_to_f32`; the lengths are whole vectors.
        unsafe { (self.activate)(act, &gate[..whole], &up[..whole], &mut out[..whole]) };
        let n = out.len() - whole;
        if n > 0 {
            let (mut g, mut u, mut y) = ([0.0; MAX_LANES], [0.0; MAX_LANES], [0.0; MAX_LANES]);
            g[..n].copy_from_slice(&gate[whole..]);
            u[..n].copy_from_slice(&up[whole..]);
            // SAFETY: as above.
            unsafe { (self.activate)(act, &g, &u, &mut y) };
            out[whole..].copy_from_slice(&y[..n]);
        }
    }
}

/// Longest vector of all ISAs, in lanes: size of the buffers for the end of a slice.
const MAX_LANES: usize = 16;

/// Calls `full(i)` for each whole vector and `part(i, n)` for the rest.
#[inline(always)]
fn by_vector<I: F32Isa>(len: usize, mut full: impl FnMut(usize), part: impl FnOnce(usize, usize)) {
    let whole = len - len % I::LANES;
    let mut i = 0;
    while i < whole {
        full(i);
        i += I::LANES;
    }
    if whole < len {
        part(whole, len - whole);
    }
}

/// A vector from the end of a slice, zeros behind it.
///
/// # Safety
///
/// The CPU has the ISA's features; so for all functions of this file.
#[inline(always)]
unsafe fn load_part<I: F32Isa>(tail: &[f32]) -> I::F {
    let mut buffer = [0f32; MAX_LANES];
    buffer[..tail.len()].copy_from_slice(tail);
    // SAFETY: the buffer has at least LANES elements.
    unsafe { I::load(buffer.as_ptr()) }
}

#[inline(always)]
unsafe fn store_part<I: F32Isa>(tail: &mut [f32], x: I::F) {
    let mut buffer = [0f32; MAX_LANES];
    // SAFETY: the buffer has at least LANES elements.
    unsafe { I::store(buffer.as_mut_ptr(), x) };
    let n = tail.len();
    tail.copy_from_slice(&buffer[..n]);
}

/// Halves of 16 bits, by their load and store.
trait Half {
    unsafe fn load<I: F32Isa>(p: *const u16) -> I::F;
    unsafe fn store<I: F32Isa>(p: *mut u16, x: I::F);
}

struct Bf16;
impl Half for Bf16 {
    #[inline(always)]
    unsafe fn load<I: F32Isa>(p: *const u16) -> I::F {
        // SAFETY: the caller's promise.
        unsafe { I::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn store<I: F32Isa>(p: *mut u16, x: I::F) {
        // SAFETY: the caller's promise.
        unsafe { I::store_bf16(p, x) }
    }
}

struct F16;
impl Half for F16 {
    #[inline(always)]
    unsafe fn load<I: F32Isa>(p: *const u16) -> I::F {
        // SAFETY: the caller's promise.
        unsafe { I::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<I: F32Isa>(p: *mut u16, x: I::F) {
        // SAFETY: the caller's promise.
        unsafe { I::store_f16(p, x) }
    }
}

#[inline(always)]
unsafe fn widen<I: F32Isa, H: Half>(src: &[u16], dst: &mut [f32]) {
    let (s, d) = (src.as_ptr(), dst.as_mut_ptr());
    by_vector::<I>(
        src.len(),
        // SAFETY: i + LANES <= len of both slices.
        |i| unsafe { I::store(d.add(i), H::load::<I>(s.add(i))) },
        |i, n| {
            let mut buffer = [0u16; MAX_LANES];
            buffer[..n].copy_from_slice(&src[i..]);
            // SAFETY: the buffer has at least LANES elements; dst has n from i on.
            unsafe {
                store_part::<I>(std::slice::from_raw_parts_mut(d.add(i), n), H::load::<I>(buffer.as_ptr()));
            };
        },
    );
}

/// Writes one vector, or its first `n` lanes.
#[inline(always)]
unsafe fn put_half<I: F32Isa, H: Half>(dst: *mut u16, n: usize, x: I::F) {
    // SAFETY: the caller has n elements at dst; the buffer has at least LANES.
    unsafe {
        if n == I::LANES {
            H::store::<I>(dst, x);
        } else {
            let mut buffer = [0u16; MAX_LANES];
            H::store::<I>(buffer.as_mut_ptr(), x);
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), dst, n);
        }
    }
}

#[inline(always)]
unsafe fn narrow<I: F32Isa, H: Half>(src: &[f32], dst: &mut [u16]) {
    let d = dst.as_mut_ptr();
    by_vector::<I>(
        src.len(),
        // SAFETY: i + LANES <= len of both slices.
        |i| unsafe { put_half::<I, H>(d.add(i), I::LANES, I::load(src.as_ptr().add(i))) },
        // SAFETY: n elements are left from i on.
        |i, n| unsafe { put_half::<I, H>(d.add(i), n, load_part::<I>(&src[i..])) },
    );
}

/// `y = f(y, t)` elementwise.
#[inline(always)]
unsafe fn update<I: F32Isa>(t: &[f32], y: &mut [f32], f: impl Fn(I::F, I::F) -> I::F) {
    let yp = y.as_mut_ptr();
    by_vector::<I>(
        t.len(),
        // SAFETY: i + LANES <= len of both slices.
        |i| unsafe { I::store(yp.add(i), f(I::load(yp.add(i)), I::load(t.as_ptr().add(i)))) },
        |i, n| {
            // SAFETY: n elements are left from i on.
            unsafe {
                let tail = std::slice::from_raw_parts_mut(yp.add(i), n);
                let new = f(load_part::<I>(tail), load_part::<I>(&t[i..]));
                store_part::<I>(tail, new);
            }
        },
    );
}

#[inline(always)]
unsafe fn scale_all<I: F32Isa>(w: f32, y: &mut [f32]) {
    let p = y.as_mut_ptr();
    let len = y.len();
    by_vector::<I>(
        len,
        // SAFETY: i + LANES <= len.
        |i| unsafe { I::store(p.add(i), I::mul(I::load(p.add(i)), I::splat(w))) },
        |i, n| {
            // SAFETY: n elements are left from i on.
            unsafe {
                let tail = std::slice::from_raw_parts_mut(p.add(i), n);
                let new = I::mul(load_part::<I>(tail), I::splat(w));
                store_part::<I>(tail, new);
            }
        },
    );
}

#[inline(always)]
unsafe fn reduce_all<I: F32Isa>(parts: &[&[f32]], mut out: OutRow<'_>) {
    let len = out.len();
    let mut put = |i: usize, n: usize, x: I::F| {
        // SAFETY: n elements of out are left from i on.
        unsafe {
            match &mut out {
                OutRow::F32(row) if n == I::LANES => I::store(row.as_mut_ptr().add(i), x),
                OutRow::F32(row) => store_part::<I>(&mut row[i..], x),
                OutRow::Bf16(row) => put_half::<I, Bf16>(row.as_mut_ptr().add(i), n, x),
                OutRow::F16(row) => put_half::<I, F16>(row.as_mut_ptr().add(i), n, x),
            }
        }
    };
    let mut i = 0;
    while i < len {
        let n = I::LANES.min(len - i);
        // SAFETY: every part has len elements.
        unsafe {
            let mut sum = I::zero();
            for (j, part) in parts.iter().enumerate() {
                let x =
                    if n == I::LANES { I::load(part.as_ptr().add(i)) } else { load_part::<I>(&part[i..]) };
                // The first part is taken as it is: 0 + -0 would lose the sign.
                sum = if j == 0 { x } else { I::add(sum, x) };
            }
            put(i, n, sum);
        }
        i += n;
    }
}

#[inline(always)]
unsafe fn activate_with<I: F32Isa>(f: ActivationFn, gated: bool, gate: &[f32], up: &[f32], out: &mut [f32]) {
    for i in (0..out.len()).step_by(I::LANES) {
        // SAFETY: the slices have the same length, a multiple of LANES.
        unsafe {
            let u = if gated { I::load(up.as_ptr().add(i)) } else { I::splat(1.0) };
            I::store(out.as_mut_ptr().add(i), activate::<I>(f, I::load(gate.as_ptr().add(i)), u));
        }
    }
}

#[inline(always)]
unsafe fn activate_all<I: F32Isa>(act: &Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { activate_with::<I>(act.function, act.gated, gate, up, out) }
}

/// Makes the functions with an ISA's features enabled and their table.
macro_rules! table {
    (@one ($feature:literal), $f:ident, ($($arg:ident: $ty:ty),*), $body:expr) => {
        #[target_feature(enable = $feature)]
        unsafe fn $f($($arg: $ty),*) {
            // SAFETY: the caller's promise.
            unsafe { $body($($arg),*) }
        }
    };
    (@one (), $f:ident, ($($arg:ident: $ty:ty),*), $body:expr) => {
        unsafe fn $f($($arg: $ty),*) {
            // SAFETY: the caller's promise.
            unsafe { $body($($arg),*) }
        }
    };
    (@all $isa:ty, $feature:tt, $(fn $f:ident($($arg:ident: $ty:ty),*) = $body:expr;)*) => {
        $(table!(@one $feature, $f, ($($arg: $ty),*), $body);)*
    };
    ($table:ident, $name:literal, $isa:ty, $($feature:literal)?) => {
        pub(super) static $table: VecOps = {
            table!(@all $isa, ($($feature)?),
                fn bf16_to_f32(src: &[u16], dst: &mut [f32]) = widen::<$isa, Bf16>;
                fn f16_to_f32(src: &[u16], dst: &mut [f32]) = widen::<$isa, F16>;
                fn f32_to_bf16(src: &[f32], dst: &mut [u16]) = narrow::<$isa, Bf16>;
                fn f32_to_f16(src: &[f32], dst: &mut [u16]) = narrow::<$isa, F16>;
                fn scale(w: f32, y: &mut [f32]) = scale_all::<$isa>;
                fn reduce(parts: &[&[f32]], out: OutRow<'_>) = reduce_all::<$isa>;
                fn activate(act: &Activation, gate: &[f32], up: &[f32], out: &mut [f32]) = activate_all::<$isa>;
                fn axpy(w: f32, t: &[f32], y: &mut [f32]) = axpy_all::<$isa>;
                fn add(t: &[f32], y: &mut [f32]) = add_all::<$isa>;
            );
            VecOps {
                name: $name,
                bf16_to_f32,
                f16_to_f32,
                f32_to_bf16,
                f32_to_f16,
                axpy,
                scale,
                add,
                reduce,
                activate,
            }
        };
    };
}

#[inline(always)]
unsafe fn axpy_all<I: F32Isa>(w: f32, t: &[f32], y: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { update::<I>(t, y, |y, t| I::fma(I::splat(w), t, y)) }
}

#[inline(always)]
unsafe fn add_all<I: F32Isa>(t: &[f32], y: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { update::<I>(t, y, |y, t| I::add(y, t)) }
}

table!(SCALAR, "scalar", Scalar,);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::simd::avx2::Avx2;
    use crate::simd::avx512::Avx512;

    table!(AVX2, "avx2", Avx2, "avx2,fma,f16c");
    table!(AVX512, "avx512", Avx512, "avx512f,avx512bw,avx512vl,avx512dq");
}
