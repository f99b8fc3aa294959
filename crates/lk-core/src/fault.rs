//! Faults on purpose: what a server does when a worker dies has to be tried on a live one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::pool::Worker;

/// What befalls one worker in the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Its share panics.
    Panic,
    /// It stands still for so long before it works.
    Stall(Duration),
}

/// A fault that waits for the next step; costs a step one relaxed load while there is none.
#[derive(Debug, Default)]
pub(crate) struct ArmedFault {
    armed: AtomicBool,
    fault: Mutex<Option<(usize, Fault)>>,
}

impl ArmedFault {
    pub(crate) fn arm(&self, worker: usize, fault: Fault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some((worker, fault));
        self.armed.store(true, Ordering::Release);
    }

    /// The fault for the step that starts now; each strikes once.
    #[inline]
    pub(crate) fn take(&self) -> Option<(usize, Fault)> {
        if self.armed.load(Ordering::Relaxed) { self.disarm() } else { None }
    }

    #[cold]
    fn disarm(&self) -> Option<(usize, Fault)> {
        self.armed.store(false, Ordering::Relaxed);
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Strikes if `worker` is the one.
#[cold]
pub(crate) fn strike((victim, fault): (usize, Fault), worker: &Worker<'_>) {
    if worker.index == victim {
        match fault {
            Fault::Panic => panic!("injected fault"),
            Fault::Stall(time) => std::thread::sleep(time),
        }
    }
}
