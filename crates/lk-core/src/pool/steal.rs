//! Tasks of one node, dealt as contiguous ranges, of which an idle worker takes from the others.

use std::ops::Range;

use crossbeam_utils::CachePadded;

use super::sync::{AtomicU64, Ordering};

/// Task indices of one node, one contiguous range per worker; every task is claimed exactly once.
///
/// A worker claims its own range from the front, in ascending order, so that it reads weights as one stream; when
/// it has none left it claims single tasks from the *end* of other ranges. Each range is one word on its own
/// cache line, and a bitmap of ranges that still hold tasks spares the idle a walk over all of them.
///
/// A claim orders nothing else: what a task reads must have been published by the start of the job or by a
/// barrier. [`reset`](Self::reset) must likewise be separated from claims by either; a job of several phases uses
/// one `StealRange` per phase.
#[derive(Debug)]
pub struct StealRange {
    /// `end << 32 | next` per owner.
    ranges: Box<[CachePadded<AtomicU64>]>,
    /// One bit per owner, set while its range may hold tasks.
    live: Box<[CachePadded<AtomicU64>]>,
}

impl StealRange {
    /// Ranges for `owners` workers (at least one), all empty.
    pub fn new(owners: usize) -> Self {
        let owners = owners.max(1);
        let words = |n: usize| (0..n).map(|_| CachePadded::new(AtomicU64::new(0))).collect();
        Self { ranges: words(owners), live: words(owners.div_ceil(64)) }
    }

    /// Number of ranges.
    pub fn owners(&self) -> usize {
        self.ranges.len()
    }

    /// Deals tasks `0..tasks` in contiguous ranges whose lengths differ by at most one. Allocates nothing.
    pub fn reset(&self, tasks: usize) {
        let owners = self.owners();
        self.reset_with(|owner| tasks * owner / owners..tasks * (owner + 1) / owners);
    }

    /// Deals owner `i` the range `range_of(i)`; for workers of unequal speed. Ranges must not overlap and their
    /// bounds must be below 2³².
    pub fn reset_with(&self, range_of: impl Fn(usize) -> Range<usize>) {
        for (word, live) in self.live.iter().enumerate() {
            let first = word * 64;
            let mut bits = 0_u64;
            for owner in first..self.owners().min(first + 64) {
                let range = range_of(owner);
                debug_assert!(u32::try_from(range.end).is_ok());
                if range.start < range.end {
                    bits |= 1 << (owner - first);
                }
                self.ranges[owner].store(pack(range.start as u32, range.end as u32), Ordering::Relaxed);
            }
            live.store(bits, Ordering::Relaxed);
        }
    }

    /// The next task for worker `owner` of the node: its own, else another's; `None` when all are claimed.
    #[inline]
    pub fn claim(&self, owner: usize) -> Option<usize> {
        self.take(owner, |next, end| (next, next + 1, end)).or_else(|| self.steal(owner))
    }

    #[cold]
    fn steal(&self, thief: usize) -> Option<usize> {
        let words = self.live.len();
        let (first_word, bit) = (thief / 64, thief % 64);
        // The thief's own word is visited twice: from its own bit upwards, and at the end below it.
        for step in 0..=words {
            let word = (first_word + step) % words;
            let part = match step {
                0 => u64::MAX << bit,
                _ if step == words => !(u64::MAX << bit),
                _ => u64::MAX,
            };
            let mut live = self.live[word].load(Ordering::Relaxed) & part;
            while live != 0 {
                let victim = word * 64 + live.trailing_zeros() as usize;
                if let Some(task) = self.take(victim, |next, end| (end - 1, next, end - 1)) {
                    return Some(task);
                }
                live &= live - 1;
            }
        }
        None
    }

    /// Shrinks a non-empty range by `split(next, end) -> (task, next, end)`.
    #[inline]
    fn take(&self, owner: usize, split: impl Fn(u32, u32) -> (u32, u32, u32)) -> Option<usize> {
        let slot = &self.ranges[owner];
        let mut word = slot.load(Ordering::Relaxed);
        loop {
            let (next, end) = unpack(word);
            if next >= end {
                return None;
            }
            let (task, next, end) = split(next, end);
            match slot.compare_exchange_weak(word, pack(next, end), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    if next == end {
                        self.live[owner / 64].fetch_and(!(1 << (owner % 64)), Ordering::Relaxed);
                    }
                    return Some(task as usize);
                }
                Err(now) => word = now,
            }
        }
    }
}

const fn pack(next: u32, end: u32) -> u64 {
    (end as u64) << 32 | next as u64
}

const fn unpack(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn own_range_ascends_then_others_from_the_end() {
        let ranges = StealRange::new(2);
        ranges.reset(7);
        let claimed: Vec<_> = std::iter::from_fn(|| ranges.claim(0)).collect();
        assert_eq!(claimed, [0, 1, 2, 6, 5, 4, 3]);
        assert_eq!(ranges.claim(1), None);
    }

    #[test]
    fn empty_is_empty() {
        let ranges = StealRange::new(3);
        assert_eq!(ranges.claim(2), None);
        ranges.reset(0);
        assert_eq!(ranges.claim(0), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_task_once_in_any_interleaving(
            owners in 1_usize..150, tasks in 0_usize..400, turns in prop::collection::vec(any::<u8>(), 1..64),
        ) {
            let ranges = StealRange::new(owners);
            for _ in 0..2 {
                ranges.reset(tasks);
                let mut seen = vec![0_u32; tasks];
                let mut who = turns.iter().cycle();
                while let Some(task) = ranges.claim(usize::from(*who.next().expect("cycle")) % owners) {
                    seen[task] += 1;
                }
                prop_assert!(seen.iter().all(|&n| n == 1));
                prop_assert!((0..owners).all(|owner| ranges.claim(owner).is_none()));
            }
        }
    }
}
