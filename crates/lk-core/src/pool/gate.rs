//! A gate that one thread advances and others wait at: spin for a bounded time, then sleep.
//!
//! Job hand-out, barriers and job completion are all gates. Generation, abort mark and the fact that
//! somebody sleeps share one word, so every decision is taken in the modification order of a single atomic:
//! a sleeper announces itself by a compare-and-swap that fails if the gate has moved, and the thread that moves
//! the gate learns from the same read-modify-write whether a wake is owed. A wake-up can't be lost and
//! nobody pays for a system call unless somebody sleeps.

use std::time::{Duration, Instant};

use super::sync::{AtomicU32, FutexWord, Ordering};

/// The job is being torn down; whoever waits at a barrier of it leaves.
const ABORTED: u32 = 1;
/// At least one thread sleeps (or is about to) on the present generation.
const SLEEPERS: u32 = 2;
/// One generation.
const STEP: u32 = 4;
/// How many sleepers a releaser and every woken thread wake in turn: waking costs the waker a system call and an
/// interrupt per sleeper, so a node of many cores is woken as a tree.
const WAKE_FANOUT: u32 = 2;
/// Polls before the clock is read for the first time.
const FIRST_POLLS: u32 = 16;
/// How often a thread that shares its CPU gives way before it sleeps: whom it waits for may need that very CPU.
const YIELDS: u32 = 2;
/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;

/// What a waiting thread compares the gate with: generation and abort mark at the time it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u32);

impl Ticket {
    /// The ticket of a gate that was never advanced.
    pub(super) const FIRST: Self = Self(0);

    /// Whether the gate carried the abort mark.
    pub(super) const fn is_aborted(self) -> bool {
        self.0 & ABORTED != 0
    }

    /// Sleepers of neighbouring generations must not take each other's wake-ups.
    const fn class(self) -> u32 {
        self.0 / STEP
    }
}

/// See the module's text. Owners pad it.
#[derive(Debug)]
pub(super) struct Gate {
    state: FutexWord,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { state: FutexWord::new(0) }
    }

    /// The present generation; acquires what was written before the gate last moved.
    #[inline]
    pub(super) fn ticket(&self) -> Ticket {
        Ticket(self.state.word.load(Ordering::Acquire) & !SLEEPERS)
    }

    /// Opens the gate for all who hold the present ticket; releases what the caller wrote before.
    #[inline]
    pub(super) fn advance(&self) {
        self.transition(|word| (word & !SLEEPERS).wrapping_add(STEP));
    }

    /// Marks the gate: everyone who waits or will wait at it sees [`Ticket::is_aborted`].
    pub(super) fn abort(&self) {
        self.transition(|word| (word & !SLEEPERS) | ABORTED);
    }

    /// Takes the abort mark away. Nobody may be waiting.
    pub(super) fn clear_abort(&self) {
        self.state.word.fetch_and(!(ABORTED | SLEEPERS), Ordering::Relaxed);
    }

    #[inline]
    fn transition(&self, next: impl Fn(u32) -> u32) {
        let mut word = self.state.word.load(Ordering::Relaxed);
        while let Err(now) =
            self.state.word.compare_exchange_weak(word, next(word), Ordering::AcqRel, Ordering::Relaxed)
        {
            word = now;
        }
        if word & SLEEPERS != 0 {
            self.state.wake(WAKE_FANOUT, Ticket(word).class());
        }
    }

    /// Returns the new ticket as soon as the gate's differs from `ticket`; spins within `spin`, then sleeps.
    #[inline]
    pub(super) fn wait(&self, ticket: Ticket, spin: &SpinBudget) -> Ticket {
        for _ in 0..FIRST_POLLS {
            let now = self.ticket();
            if now != ticket {
                return now;
            }
            if spin.limit_ns == 0 || spin.crowded {
                break;
            }
            pause();
        }
        self.wait_long(ticket, spin)
    }

    #[cold]
    fn wait_long(&self, ticket: Ticket, spin: &SpinBudget) -> Ticket {
        let budget = spin.current();
        if budget.is_zero() {
            return self.sleep(ticket);
        }
        if spin.crowded {
            for _ in 0..YIELDS {
                give_way();
                let now = self.ticket();
                if now != ticket {
                    return now;
                }
            }
            return self.sleep(ticket);
        }
        let start = Instant::now();
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                let now = self.ticket();
                if now != ticket {
                    spin.paid_off();
                    return now;
                }
                pause();
            }
            if start.elapsed() >= budget {
                let now = self.sleep(ticket);
                spin.learn(start.elapsed());
                return now;
            }
        }
    }

    fn sleep(&self, ticket: Ticket) -> Ticket {
        let asleep = ticket.0 | SLEEPERS;
        let mut slept = false;
        loop {
            let announced =
                self.state.word.compare_exchange(ticket.0, asleep, Ordering::Relaxed, Ordering::Relaxed);
            match announced {
                Ok(_) => {}
                Err(word) if word == asleep => {}
                Err(_) => {
                    if slept {
                        self.state.wake(WAKE_FANOUT, ticket.class());
                    }
                    return self.ticket();
                }
            }
            self.state.sleep(asleep, ticket.class());
            slept = true;
        }
    }
}

#[inline]
fn pause() {
    #[cfg(not(loom))]
    std::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}

#[inline]
fn give_way() {
    #[cfg(not(loom))]
    std::thread::yield_now();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// How long one thread spins at one kind of gate; shrinks while spinning does not pay.
///
/// Only the owning thread writes it. A wait longer than the limit means that the time spent spinning was
/// taken from somebody (another runnable thread, or the power bill) for nothing, so the next one is halved; a
/// wait within the limit restores it.
#[derive(Debug)]
pub(super) struct SpinBudget {
    limit_ns: u32,
    /// Other workers run on the same CPUs: spinning would hold up those who are waited for.
    crowded: bool,
    current_ns: AtomicU32,
}

impl SpinBudget {
    /// Fraction of the limit below which the budget does not shrink, as a shift.
    const FLOOR_SHIFT: u32 = 5;

    pub(super) fn new(limit: Duration, crowded: bool) -> Self {
        let limit_ns = u32::try_from(limit.as_nanos()).unwrap_or(u32::MAX);
        Self { limit_ns, crowded, current_ns: AtomicU32::new(limit_ns) }
    }

    fn current(&self) -> Duration {
        Duration::from_nanos(u64::from(self.current_ns.load(Ordering::Relaxed)))
    }

    /// The wait ended while spinning.
    fn paid_off(&self) {
        self.current_ns.store(self.limit_ns, Ordering::Relaxed);
    }

    /// The wait ended asleep.
    fn learn(&self, waited: Duration) {
        let next = if waited.as_nanos() <= u128::from(self.limit_ns) {
            self.limit_ns
        } else {
            (self.current_ns.load(Ordering::Relaxed) / 2).max(self.limit_ns >> Self::FLOOR_SHIFT)
        };
        self.current_ns.store(next, Ordering::Relaxed);
    }
}
