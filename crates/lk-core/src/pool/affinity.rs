//! CPU masks of threads, by the system's own calls: they must work where hwloc can't be asked.

use std::io;

use crate::topology::CpuId;

/// System number of a thread.
pub(super) type ThreadId = libc::pid_t;

/// Binds a thread of this process, 0 for the calling one, to `cpus`.
pub(super) fn bind_thread(thread: ThreadId, cpus: &[CpuId]) -> io::Result<()> {
    let words = cpus.iter().map(|cpu| cpu.0 as usize / 64 + 1).max().unwrap_or(1);
    let mut mask = vec![0_u64; words];
    for cpu in cpus {
        mask[cpu.0 as usize / 64] |= 1 << (cpu.0 % 64);
    }
    // SAFETY: the kernel reads `words * 8` bytes of the vector; the size is given in bytes, so machines with more
    // CPUs than `cpu_set_t` has bits need nothing special.
    let status = unsafe { libc::sched_setaffinity(thread, words * 8, mask.as_ptr().cast()) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Number of the calling thread.
pub(super) fn current_thread() -> ThreadId {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::gettid() }
}

/// CPU that the calling thread runs on at this moment, if it can be told.
#[inline]
pub(super) fn current_cpu() -> Option<CpuId> {
    // SAFETY: no arguments; served from memory shared with the kernel, without a system call.
    u32::try_from(unsafe { libc::sched_getcpu() }).ok().map(CpuId)
}

/// Keeps signals away from the calling thread: handlers of the host program (Python's) belong on its own threads.
pub(super) fn block_signals() {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set that it is given.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT] {
        // SAFETY: the set was initialised above, the signals are valid. Faults must stay deliverable: a fault
        // that is blocked kills the process without its handlers (fault dumps) having run.
        unsafe { libc::sigdelset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: the set is initialised; the old mask is not wanted.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) };
}

/// Readies a thread that serves the engine without being a worker: signals stay away, it runs on `cpus`, and its naps
/// end on time (the default slack of timers is as long as a nap).
#[cfg(feature = "cuda")]
pub(crate) fn prepare_service_thread(cpus: &[CpuId]) -> io::Result<()> {
    block_signals();
    // SAFETY: changes a number of the calling thread; a refusal makes naps longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    bind_thread(0, cpus)
}
