//! Arenas, lazy buffers, binders and scratch on this machine, and with system calls that fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![expect(unsafe_code, reason = "writes through the raw pointers that the types hand out")]

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use lk_core::Error;
use lk_core::mem::{
    AlignedVec, BindCall, BindOutcome, HUGE_PAGE_BYTES, LazyBuffer, LinuxCalls, MemBinder, NodeArena,
    NullBinder, PageCounts, PolicyCalls, RecordingBinder, SyscallBinder, ThreadInterleave, locality,
    numa_maps_counts,
};
use lk_core::topology::NodeId;
use proptest::prelude::*;

const MIB: usize = 1 << 20;

/// Makes every policy call fail with one errno and counts the calls.
struct FailingCalls {
    errno: i32,
    mbinds: Arc<AtomicUsize>,
}

impl PolicyCalls for FailingCalls {
    fn mbind(&self, _: usize, _: usize, _: i32, _: &[u64]) -> Result<(), i32> {
        self.mbinds.fetch_add(1, Ordering::Relaxed);
        Err(self.errno)
    }
    fn set_thread_policy(&self, _: i32, _: &[u64]) -> Result<(), i32> {
        Err(self.errno)
    }
    fn thread_policy(&self, _: &mut [u64]) -> Result<i32, i32> {
        Err(self.errno)
    }
    fn query_pages(&self, _: &[usize], _: &mut [i32]) -> Result<(), i32> {
        Err(self.errno)
    }
}

/// Accepts only masks that hold exactly the node 130, and says that all pages are there but every tenth.
struct FarNode;

impl PolicyCalls for FarNode {
    fn mbind(&self, _: usize, _: usize, mode: i32, nodes: &[u64]) -> Result<(), i32> {
        if mode == libc::MPOL_PREFERRED && nodes == [0, 0, 1 << 2] { Ok(()) } else { Err(libc::EINVAL) }
    }
    fn set_thread_policy(&self, _: i32, _: &[u64]) -> Result<(), i32> {
        Err(libc::EINVAL)
    }
    fn thread_policy(&self, _: &mut [u64]) -> Result<i32, i32> {
        Err(libc::EINVAL)
    }
    fn query_pages(&self, _: &[usize], status: &mut [i32]) -> Result<(), i32> {
        for (index, node) in status.iter_mut().enumerate() {
            *node = if index % 10 == 9 { -libc::ENOENT } else { 130 };
        }
        Ok(())
    }
}

#[test]
fn arena_is_aligned_bound_whole_and_zero() {
    let binder = RecordingBinder::default();
    for bytes in [0, 1, 4096, 2 * MIB, 5 * MIB + 3] {
        let arena = NodeArena::new(NodeId(3), bytes, &binder).unwrap();
        assert_eq!(arena.as_ptr().addr() % HUGE_PAGE_BYTES, 0);
        assert_eq!((arena.len(), arena.node(), arena.outcome()), (bytes, NodeId(3), BindOutcome::Bound));
        let BindCall { addr, len, nodes } = binder.calls().pop().unwrap();
        assert_eq!((addr, nodes), (arena.as_ptr().addr(), vec![NodeId(3)]));
        assert!(len >= bytes && len.is_multiple_of(HUGE_PAGE_BYTES));
        let arena = arena.seal();
        assert!(arena.slice(0, bytes).iter().all(|&b| b == 0));
        assert!(arena.slice(bytes, 0).is_empty());
    }
}

#[test]
fn workers_write_disjoint_claims_then_all_read() {
    const WORKERS: usize = 4;
    const PART: usize = MIB + 17;
    let arena = NodeArena::new(NodeId(0), WORKERS * PART, &SyscallBinder::new()).unwrap();
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let arena = &arena;
            scope.spawn(move || arena.claim(worker * PART, PART).unwrap().fill(worker as u8 + 1));
        }
    });
    let sealed = arena.seal_read_only();
    for worker in 0..WORKERS {
        assert!(sealed.slice(worker * PART, PART).iter().all(|&b| b == worker as u8 + 1));
    }
    // A reload of one part keeps the others.
    let arena = sealed.unseal().unwrap();
    arena.claim(0, PART).unwrap().fill(9);
    let sealed = arena.seal();
    assert_eq!((sealed.slice(0, 1)[0], sealed.slice(PART, 1)[0]), (9, 2));
    // A release gives all back, and the arena is usable again.
    let arena = sealed.release().unwrap();
    assert!(arena.claim(0, WORKERS * PART).unwrap().iter().all(|&b| b == 0));
}

#[test]
fn overlapping_claims_are_refused_until_dropped() {
    let arena = NodeArena::new(NodeId(0), 1000, &NullBinder).unwrap();
    let held = arena.claim(100, 100).unwrap();
    for (offset, len) in [(100, 100), (0, 101), (199, 1), (150, 10), (0, 1000)] {
        let error = arena.claim(offset, len).unwrap_err();
        assert!(matches!(&error, Error::Argument(m) if m.contains("another worker")), "{error}");
    }
    let _before = arena.claim(0, 100).unwrap();
    let _after = arena.claim(200, 800).unwrap();
    drop(arena.claim(150, 0).unwrap());
    drop(held);
    drop(arena.claim(100, 100).unwrap());
    for (offset, len) in [(0, 1001), (1001, 0), (usize::MAX, 2)] {
        let error = arena.claim(offset, len).unwrap_err();
        assert!(matches!(&error, Error::Argument(m) if m.contains("out of range")), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// The table of claims against a plain list of ranges.
    #[test]
    fn claims_agree_with_a_model(steps in prop::collection::vec((0..64usize, 1..20usize, prop::bool::ANY), 1..40)) {
        let arena = NodeArena::new(NodeId(0), 100, &NullBinder).unwrap();
        let mut held = Vec::new();
        for (offset, len, drop_one) in steps {
            if drop_one && !held.is_empty() {
                held.swap_remove(offset % held.len());
                continue;
            }
            let free = held.iter().all(|(o, l, _): &(usize, usize, _)| offset + len <= *o || o + l <= offset);
            let claim = arena.claim(offset, len);
            prop_assert_eq!(claim.is_ok(), free);
            held.extend(claim.ok().map(|c| (offset, len, c)));
        }
    }
}

#[test]
fn unchecked_slices() {
    let arena = NodeArena::new(NodeId(0), 64, &NullBinder).unwrap();
    // SAFETY: the two ranges don't overlap, and nothing else uses the arena.
    let (left, right) = unsafe { (arena.slice_mut(0, 32), arena.slice_mut(32, 32)) };
    left.fill(1);
    right.fill(2);
    // SAFETY: no writer is alive.
    assert_eq!(unsafe { arena.slice(31, 2) }, [1, 2]);
}

#[test]
#[should_panic(expected = "range 60+5 exceeds the arena of 64 bytes")]
fn reading_beyond_a_sealed_arena_panics() {
    NodeArena::new(NodeId(0), 64, &NullBinder).unwrap().seal().slice(60, 5);
}

#[test]
fn an_impossible_size_is_out_of_memory_with_a_way_out() {
    for bytes in [1 << 62, usize::MAX - 5] {
        let error = NodeArena::new(NodeId(7), bytes, &NullBinder).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { node: 7, bytes: b, .. } if b == bytes), "{error}");
    }
    let error = NodeArena::new(NodeId(7), 1 << 50, &NullBinder).unwrap_err().to_string();
    assert!(error.contains("on node 7") && error.contains("place fewer layers on the CPU"), "{error}");
}

#[test]
fn refused_policies_degrade_to_first_touch() {
    for (errno, latches) in [(libc::ENOSYS, true), (libc::EPERM, true), (libc::EINVAL, false)] {
        let mbinds = Arc::new(AtomicUsize::new(0));
        let binder = SyscallBinder::with_calls(FailingCalls { errno, mbinds: mbinds.clone() });
        for _ in 0..3 {
            let arena = NodeArena::new(NodeId(0), MIB, &binder).unwrap();
            assert_eq!(arena.outcome(), BindOutcome::FirstTouch { errno });
            arena.claim(0, MIB).unwrap().fill(1);
        }
        // What can never succeed is asked once only; a bad node is no reason to give up on others.
        assert_eq!(mbinds.load(Ordering::Relaxed), if latches { 1 } else { 3 });
        let note = binder.note();
        assert_eq!(note.is_some(), latches);
        assert!(note.is_none_or(|n| n.contains("using first touch from pinned threads")));
    }
}

#[test]
fn node_masks_go_by_number_and_absent_pages_do_not_count() {
    let binder = SyscallBinder::with_calls(FarNode);
    let arena = NodeArena::new(NodeId(130), MIB, &binder).unwrap();
    assert_eq!(arena.outcome(), BindOutcome::Bound);
    assert_eq!(
        NodeArena::new(NodeId(2), MIB, &binder).unwrap().outcome(),
        BindOutcome::FirstTouch { errno: libc::EINVAL }
    );
    let counts = binder.where_is(arena.as_ptr(), 100 * 4096).unwrap();
    assert_eq!(counts, PageCounts { by_node: BTreeMap::from([(NodeId(130), 90)]), absent: 10 });
}

#[test]
fn locality_of_this_machine() {
    let binder = SyscallBinder::new();
    let node = NodeId(0);
    let arena = NodeArena::new(node, 8 * MIB, &binder).unwrap();
    if let Some(counts) = binder.where_is(arena.as_ptr(), arena.len()) {
        assert_eq!(counts.by_node, BTreeMap::new(), "an untouched arena has no pages");
    }
    arena.claim(0, 8 * MIB).unwrap().fill(1);
    let arena = arena.seal();
    let report = locality(&binder, [(node, arena.slice(0, 8 * MIB))]);
    match report.is_local() {
        Some(local) => {
            assert!(local, "{report}");
            assert_eq!(
                report.to_string(),
                "100.0 % of 2048 sampled pages are on their own node (node 0: 2048/2048)"
            );
        }
        None => println!("not measured: {report}"),
    }
}

#[test]
fn locality_says_what_is_remote_and_what_is_unknown() {
    let page = vec![0u8; 8 * 4096];
    let binder = SyscallBinder::with_calls(FarNode);
    let report = locality(&binder, [(NodeId(130), &page[..]), (NodeId(1), &page[..4096])]);
    assert_eq!(report.is_local(), Some(false));
    assert!(report.to_string().contains("node 1: 0/"), "{report}");
    let report = locality(&NullBinder, [(NodeId(1), &page[..])]);
    assert_eq!(report.is_local(), None);
    assert_eq!(report.to_string(), "the system doesn't tell where pages are");
}

#[test]
fn numa_maps_lines() {
    let maps = "7f0000000000 prefer:1 anon=6 dirty=6 active=0 N0=2 N1=4 kernelpagesize_kB=4\n\
                7f0000200000 default stack anon=3 N0=3 kernelpagesize_kB=4\n";
    let counts = numa_maps_counts(maps, 0x7f00_0000_0000, 0x7f00_0020_0000).unwrap();
    assert_eq!(counts.by_node, BTreeMap::from([(NodeId(0), 2), (NodeId(1), 4)]));
    assert_eq!(numa_maps_counts(maps, 0x7f00_0000_1000, 0x7f00_0020_0000), None);
}

#[test]
fn interleave_reaches_the_kernel() {
    let binder = SyscallBinder::new();
    let buffer = LazyBuffer::new(MIB).unwrap();
    let outcome = binder.interleave(buffer.as_ptr(), MIB, &[NodeId(0)]);
    assert!(matches!(outcome, BindOutcome::Bound | BindOutcome::FirstTouch { .. }), "{outcome:?}");
    assert_eq!(binder.interleave(buffer.as_ptr(), MIB, &[]), BindOutcome::Skipped);
}

/// Remembers the thread policies that were set; the one in force at the start is `bind` to node 1.
#[derive(Clone, Default)]
struct ThreadPolicies(Arc<Mutex<Vec<Policy>>>);

/// Mode and node mask.
type Policy = (i32, Vec<u64>);

impl PolicyCalls for ThreadPolicies {
    fn mbind(&self, _: usize, _: usize, _: i32, _: &[u64]) -> Result<(), i32> {
        Err(libc::EINVAL)
    }
    fn set_thread_policy(&self, mode: i32, nodes: &[u64]) -> Result<(), i32> {
        self.0.lock().unwrap().push((mode, nodes.to_vec()));
        Ok(())
    }
    fn thread_policy(&self, nodes: &mut [u64]) -> Result<i32, i32> {
        nodes[0] = 2;
        Ok(libc::MPOL_BIND)
    }
    fn query_pages(&self, _: &[usize], _: &mut [i32]) -> Result<(), i32> {
        Err(libc::EINVAL)
    }
}

#[test]
fn thread_interleave_restores_the_inherited_policy() {
    let calls = ThreadPolicies::default();
    let guard = ThreadInterleave::with_calls(calls.clone(), &[NodeId(0), NodeId(8)]);
    assert_eq!(guard.outcome(), BindOutcome::Bound);
    assert_eq!(*calls.0.lock().unwrap(), [(libc::MPOL_INTERLEAVE, vec![0x101])]);
    drop(guard);
    let (mode, nodes) = calls.0.lock().unwrap()[1].clone();
    assert_eq!((mode, nodes[0], nodes[1..].iter().sum::<u64>()), (libc::MPOL_BIND, 2, 0));
    // One node, or a refusal: nothing is set and nothing restored.
    assert_eq!(ThreadInterleave::with_calls(calls.clone(), &[NodeId(0)]).outcome(), BindOutcome::Skipped);
    assert_eq!(calls.0.lock().unwrap().len(), 2);
    let failing = FailingCalls { errno: libc::EPERM, mbinds: Arc::default() };
    let guard = ThreadInterleave::with_calls(failing, &[NodeId(0), NodeId(1)]);
    assert_eq!(guard.outcome(), BindOutcome::FirstTouch { errno: libc::EPERM });
}

#[test]
fn thread_policy_round_trip_through_the_kernel() {
    let calls = LinuxCalls;
    let mut nodes = [0u64; 16];
    if calls.thread_policy(&mut nodes) != Ok(libc::MPOL_DEFAULT) {
        return; // No NUMA support, not permitted, or started under numactl.
    }
    calls.set_thread_policy(libc::MPOL_INTERLEAVE, &[1]).unwrap();
    assert_eq!((calls.thread_policy(&mut nodes), nodes[0]), (Ok(libc::MPOL_INTERLEAVE), 1));
    calls.set_thread_policy(libc::MPOL_DEFAULT, &[]).unwrap();
    assert_eq!((calls.thread_policy(&mut nodes), nodes[0]), (Ok(libc::MPOL_DEFAULT), 0));
}

/// Bytes of `len` from `ptr` on that are in memory, by the process's page table.
fn present(ptr: *const u8, len: usize) -> usize {
    let mut entries = vec![0u8; len / 4096 * 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entries, (ptr.addr() / 4096 * 8) as u64).unwrap();
    entries.chunks_exact(8).filter(|e| e[7] & 0x80 != 0).count() * 4096
}

#[test]
fn lazy_buffer_costs_nothing_until_written_and_gives_back_what_is_released() {
    const EXPERT: usize = 16 * MIB + 1000;
    const EXPERTS: usize = 8;
    // Far more than this machine has: address space is all that it costs.
    let buffer = LazyBuffer::new(1 << 40).unwrap();
    assert_eq!(buffer.len(), 1 << 40);
    let resident = || present(buffer.as_ptr(), 256 * MIB);
    assert_eq!(resident(), 0);
    for expert in 0..EXPERTS {
        // SAFETY: within the buffer; only this thread uses it.
        unsafe { std::ptr::write_bytes(buffer.as_ptr().add(expert * EXPERT), 7, EXPERT) }
    }
    assert_eq!(resident(), (EXPERTS * EXPERT).next_multiple_of(4096));
    let full = resident();
    let mut given_back = 0;
    for expert in 0..EXPERTS - 1 {
        let released = buffer.release(expert * EXPERT, EXPERT).unwrap();
        assert!(released > EXPERT - 2 * 4096 && released.is_multiple_of(4096));
        given_back += released;
        assert_eq!(resident(), full - given_back);
    }
    let byte = |at: usize| {
        // SAFETY: as above.
        unsafe { buffer.as_ptr().add(at).read() }
    };
    // Whole pages are zero; the page that two experts share keeps its contents, and the last expert all of them.
    assert_eq!(byte(5000), 0);
    assert_eq!(byte(EXPERT), 7);
    assert_eq!(byte((EXPERTS - 1) * EXPERT), 7);
    assert_eq!(byte(EXPERTS * EXPERT - 1), 7);
}

#[test]
fn lazy_buffer_counts_resident_pages() {
    let bytes = 300 * MIB + 5;
    let buffer = LazyBuffer::new(bytes).unwrap();
    assert_eq!(buffer.resident_bytes(), Some(0));
    // SAFETY: within the buffer; only this thread uses it.
    unsafe {
        buffer.as_ptr().add(10 * 4096).write(1);
        buffer.as_ptr().add(290 * MIB).write(1);
        buffer.as_ptr().add(bytes - 1).write(1);
    }
    assert_eq!(buffer.resident_bytes(), Some(3 * 4096));
    // Part of a page: kept. The rest of the last page belongs to the end.
    assert_eq!(buffer.release(10 * 4096, 4095).unwrap(), 0);
    assert_eq!(buffer.release(10 * 4096 + 1, 4096).unwrap(), 0);
    assert_eq!(buffer.release(300 * MIB, 5).unwrap(), 4096);
    assert_eq!(buffer.release(10 * 4096, 4096).unwrap(), 4096);
    assert_eq!(buffer.resident_bytes(), Some(4096));
    assert_eq!(buffer.release(0, bytes).unwrap(), bytes.next_multiple_of(4096));
    assert_eq!(buffer.resident_bytes(), Some(0));
    assert_eq!(LazyBuffer::new(0).unwrap().release(0, 0).unwrap(), 0);
}

#[test]
#[should_panic(expected = "exceeds the buffer of 4096 bytes")]
fn releasing_beyond_the_buffer_panics() {
    let _ = LazyBuffer::new(4096).unwrap().release(1, 4096);
}

#[test]
fn mappings_are_unmapped_on_drop() {
    // 4096 arenas of 1 TiB exceed the 128 TiB of address space unless each is unmapped before the next.
    for _ in 0..4096 {
        NodeArena::new(NodeId(0), 1 << 40, &NullBinder).unwrap();
        LazyBuffer::new(1 << 40).unwrap();
    }
}

#[test]
fn scratch_is_aligned_and_zero() {
    for len in [0, 1, 3, 64, 1000, 1 << 20] {
        let mut floats = AlignedVec::<f32>::zeroed(len);
        assert_eq!((floats.as_ptr().addr() % 64, floats.len()), (0, len));
        assert!(floats.iter().all(|&x| x == 0.0));
        floats.fill(1.5);
        let copy = floats.clone();
        assert_eq!(copy[..], floats[..]);
        let words = AlignedVec::<u16>::zeroed(len);
        assert_eq!(words.as_ptr().addr() % 64, 0);
    }
    assert!(AlignedVec::<u8>::default().is_empty());
    // Zeros of a large buffer cost nothing until something else is written.
    let large = AlignedVec::<f32>::zeroed(256 * MIB);
    assert!(present(large.as_ptr().cast(), 1024 * MIB) <= 2 * HUGE_PAGE_BYTES);
    assert!(large[large.len() - 1].abs() < f32::EPSILON);
}
