//! Atomics, cells and the sleep primitive, from `std` or, under `--cfg loom`, from the model checker.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

#[cfg(loom)]
pub(super) use loom::{cell::UnsafeCell, sync::Mutex};
#[cfg(not(loom))]
pub(super) use std::sync::Mutex;

/// `std`'s cell behind the closure interface of loom's, so that one text serves both.
#[cfg(not(loom))]
#[derive(Debug)]
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline]
    pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A word on which threads can sleep: Linux futex, or its model.
///
/// `class` splits the sleepers: a wake reaches only sleepers of its own class (of 32).
#[derive(Debug)]
pub(super) struct FutexWord {
    pub(super) word: AtomicU32,
    #[cfg(loom)]
    lock: Mutex<()>,
    #[cfg(loom)]
    queues: [loom::sync::Condvar; 2],
}

#[cfg(not(loom))]
impl FutexWord {
    pub(super) const fn new(value: u32) -> Self {
        Self { word: AtomicU32::new(value) }
    }

    /// Sleeps while the word equals `expected`; may return early (signal, changed value).
    pub(super) fn sleep(&self, expected: u32, class: u32) {
        // SAFETY: FUTEX_WAIT_BITSET reads one aligned u32 that `self` keeps alive; the timeout pointer may be
        // null (no limit) and the second address is ignored by this operation.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word.as_ptr(),
                libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG,
                expected,
                std::ptr::null::<libc::timespec>(),
                std::ptr::null::<u32>(),
                1_u32 << (class % 32),
            );
        }
    }

    /// Wakes up to `count` sleepers of `class`.
    pub(super) fn wake(&self, count: u32, class: u32) {
        // SAFETY: FUTEX_WAKE_BITSET uses the address of a live u32 as a key only; the pointers are ignored.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word.as_ptr(),
                libc::FUTEX_WAKE_BITSET | libc::FUTEX_PRIVATE_FLAG,
                count,
                std::ptr::null::<libc::timespec>(),
                std::ptr::null::<u32>(),
                1_u32 << (class % 32),
            );
        }
    }
}

#[cfg(loom)]
impl FutexWord {
    pub(super) fn new(value: u32) -> Self {
        Self {
            word: AtomicU32::new(value),
            lock: Mutex::new(()),
            queues: [loom::sync::Condvar::new(), loom::sync::Condvar::new()],
        }
    }

    pub(super) fn sleep(&self, expected: u32, class: u32) {
        // The kernel compares and enqueues under the lock of the hash bucket; so does the model.
        if let Ok(guard) = self.lock.lock() {
            if self.word.load(Ordering::Relaxed) == expected {
                drop(self.queues[class as usize % 2].wait(guard));
            }
        }
    }

    pub(super) fn wake(&self, count: u32, class: u32) {
        if let Ok(_guard) = self.lock.lock() {
            for _ in 0..count {
                self.queues[class as usize % 2].notify_one();
            }
        }
    }
}
