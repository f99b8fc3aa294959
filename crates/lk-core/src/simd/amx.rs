//! AMX tiles: detection and the permission that Linux wants before the first tile instruction.

use std::sync::OnceLock;

/// Whether AMX (tile, bf16, int8) may be used: CPUID, the operating system's state mask, and the process's permission.
/// The permission is asked for on the first call and the answer is kept.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(probe)
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn probe() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const OSXSAVE: u32 = 1 << 27;
    const XCR0_TILES: u64 = 0b11 << 17;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;

    /// # Safety
    ///
    /// CPUID reports OSXSAVE.
    #[target_feature(enable = "xsave")]
    unsafe fn state_mask() -> u64 {
        // SAFETY: the feature is enabled and, by the caller's promise, present.
        unsafe { _xgetbv(0) }
    }

    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let wanted = AMX_BF16 | AMX_TILE | AMX_INT8;
    if __cpuid_count(7, 0).edx & wanted != wanted {
        return false;
    }
    // SAFETY: OSXSAVE was checked above.
    if unsafe { state_mask() } & XCR0_TILES != XCR0_TILES {
        return false;
    }
    // SAFETY: a system call that takes two integers and touches no memory of ours; it fails on kernels that don't know it.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn probe() -> bool {
    false
}

/// The operand of `ldtilecfg`: palette 1, the rows of each tile and 64 bytes per row.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
pub(crate) struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

#[cfg(target_arch = "x86_64")]
const _: () = assert!(std::mem::size_of::<TileConfig>() == 64);

#[cfg(target_arch = "x86_64")]
impl TileConfig {
    /// Eight tiles with the given rows (0 to 16; a tile without rows must not be used), each 64 bytes wide.
    pub(crate) const fn new(rows: [u8; 8]) -> Self {
        let mut config =
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut t = 0;
        while t < 8 {
            if rows[t] > 0 {
                config.rows[t] = rows[t];
                config.row_bytes[t] = 64;
            }
            t += 1;
        }
        config
    }

    /// Makes this the configuration of the calling thread and zeroes its tiles.
    ///
    /// # Safety
    ///
    /// [`available`] returned true.
    #[inline(always)]
    pub(crate) unsafe fn load(&self) {
        // SAFETY: the caller's promise; the operand is 64 readable bytes.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) self, options(nostack, preserves_flags, readonly));
        }
    }
}

/// Gives the tile state of the calling thread up, so that context switches need not save it.
///
/// # Safety
///
/// [`available`] returned true.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe {
        std::arch::asm!("tilerelease", options(nostack, preserves_flags, nomem));
    }
}
