//! Kernels and packing stay inside of their buffers: every buffer ends at, or begins behind, a page that may not be touched.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "tests that map memory")]
#![allow(missing_docs, reason = "tests")]

#[path = "kernels/support.rs"]
mod support;

use lk_core::kernel::{KernelSet, Operand, OutRow, Rows, VecOps};
use lk_core::simd::{Cpu, IsaLevel};
use lk_core::tile::{CheckpointView, Grid, NR, TileLayout, pack_panels};
use support::{formats, random_packed};

/// Bytes that end where a forbidden page begins (or begin where one ends).
struct Guarded {
    map: *mut u8,
    map_bytes: usize,
    at: *mut u8,
    len: usize,
}

impl Guarded {
    /// `len` bytes, the last of them directly before a forbidden page if `high`, else the first directly behind one.
    fn new(len: usize, high: bool) -> Self {
        let page = 4096;
        let body = len.next_multiple_of(page).max(page);
        let map_bytes = body + 2 * page;
        // SAFETY: a fresh private mapping of our own; the two guard pages lie inside of it.
        unsafe {
            let map = libc::mmap(
                std::ptr::null_mut(),
                map_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert!(map != libc::MAP_FAILED);
            let map = map.cast::<u8>();
            assert_eq!(libc::mprotect(map.cast(), page, libc::PROT_NONE), 0);
            assert_eq!(libc::mprotect(map.add(page + body).cast(), page, libc::PROT_NONE), 0);
            let at = if high { map.add(page + body - len) } else { map.add(page) };
            Self { map, map_bytes, at, len }
        }
    }

    fn of<T: Copy>(values: &[T], high: bool) -> Self {
        let bytes = std::mem::size_of_val(values);
        let out = Self::new(bytes, high);
        // SAFETY: `out` has as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), out.at, bytes) };
        out
    }

    #[expect(clippy::mut_from_ref, reason = "one view at a time in these tests")]
    fn slice<T>(&self) -> &mut [T] {
        assert_eq!(self.at.align_offset(std::mem::align_of::<T>()), 0);
        // SAFETY: the bytes are ours, zeroed or written, and any bit pattern is a T (u8, u16, f32).
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.len / std::mem::size_of::<T>()) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.map.cast(), self.map_bytes) };
    }
}

#[test]
fn kernels_touch_nothing_beyond_their_buffers() {
    let cpu = Cpu::detect();
    for format in formats() {
        for kernel in KernelSet::all(format, cpu) {
            for k in [32, 80, 320] {
                let layout = TileLayout::slice_of(format, NR, k, 0, 0, k).unwrap();
                let packed = random_packed(&layout, 5);
                for m in [1, 3, 7, 16, 17, 33, 40] {
                    for high in [true, false] {
                        let width = layout.k_padded();
                        let panel = Guarded::of(&packed, high);
                        let x = Guarded::of(&vec![0.5f32; m * width], high);
                        let xb = Guarded::of(&vec![0x3f00u16; m * width], high);
                        let out = Guarded::new(m * NR * 4, high);
                        let rows = match kernel.operand() {
                            Operand::F32 => Rows::f32(x.slice(), width, width),
                            Operand::Bf16 => Rows::bf16(xb.slice(), width, width),
                        };
                        kernel.run(panel.slice(), &layout, &rows, out.slice());
                        let reversed: Vec<u32> = (0..m as u32).rev().collect();
                        kernel.run(panel.slice(), &layout, &rows.pick(&reversed), out.slice());
                    }
                }
            }
        }
    }
}

#[test]
fn packing_and_vector_operations_touch_nothing_beyond_their_buffers() {
    let cpu = Cpu::detect();
    for high in [true, false] {
        for (n, k) in [(1, 1), (5, 17), (33, 48), (64, 128)] {
            let source = Guarded::of(&vec![0x3c3cu16; n * k], high);
            let view =
                CheckpointView::plain(lk_core::Dtype::Bf16, Grid::rows(source.slice(), 2, k), n, k).unwrap();
            let layout = view.layout().unwrap();
            let packed = Guarded::new(layout.bytes(), high);
            pack_panels(&view, &layout, 0..layout.panels(), packed.slice(), 1).unwrap();
        }
        for level in IsaLevel::ALL {
            let Ok(capped) = cpu.capped(level) else { continue };
            let ops = VecOps::get(capped);
            for len in [1, 7, 8, 15, 16, 31, 33] {
                let (a, b) = (Guarded::of(&vec![0.5f32; len], high), Guarded::of(&vec![1.5f32; len], high));
                let (h, y) = (Guarded::new(len * 2, high), Guarded::new(len * 4, high));
                ops.f32_to_bf16(a.slice(), h.slice());
                ops.bf16_to_f32(h.slice(), y.slice());
                ops.f32_to_f16(a.slice(), h.slice());
                ops.f16_to_f32(h.slice(), y.slice());
                ops.axpy(2.0, a.slice(), y.slice());
                ops.add(b.slice(), y.slice());
                ops.scale(0.5, y.slice());
                ops.reduce(&[a.slice(), b.slice()], OutRow::Bf16(h.slice()));
                ops.reduce(&[a.slice(), b.slice()], OutRow::F32(y.slice()));
                for name in ["silu", "gelu", "relu2_no_mul", "situ"] {
                    let act = lk_core::kernel::Activation::parse(
                        name,
                        lk_core::kernel::ActivationParams::default(),
                    )
                    .unwrap();
                    ops.activate(&act, a.slice(), b.slice(), y.slice());
                }
            }
        }
    }
}
