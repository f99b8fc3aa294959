//! Placing workers: counts, order, ranks, quotas, on synthetic machines and random ones.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeSet;

use lk_core::topology::{
    Binding, Core, CpuId, NodeId, NumaNode, PlanRequest, Topology, WorkerPlan, format_id_list, plan_workers,
};
use proptest::prelude::*;

const ONE_NODE: &str = "pack:1 core:4 pu:1";
/// Two sockets of 18 cores, siblings numbered 36 higher.
const TWO_SOCKETS: &str = "pack:2 [numa] core:18 pu:2(indexes=2*36:1*2)";
const NPS4: &str = "pack:2 group:4 [numa] core:12 pu:1";

fn cpus(ids: impl IntoIterator<Item = u32>) -> Vec<CpuId> {
    ids.into_iter().map(CpuId).collect()
}

/// (node, number of workers, CPUs) by node.
fn rows(plan: &WorkerPlan) -> Vec<(u32, usize, String)> {
    let cpus = |n: &lk_core::topology::NodePlan| {
        n.workers.iter().flat_map(|w| w.cpus.clone()).map(|c| c.0).collect::<Vec<_>>()
    };
    plan.nodes.iter().map(|n| (n.node.0, n.workers.len(), format_id_list(cpus(n)))).collect()
}

fn cpu_set(plan: &WorkerPlan) -> BTreeSet<u32> {
    plan.nodes.iter().flat_map(|n| &n.workers).flat_map(|w| &w.cpus).map(|c| c.0).collect()
}

fn threads(n: usize) -> PlanRequest {
    PlanRequest { threads: Some(n), ..PlanRequest::default() }
}

#[test]
fn one_node() {
    let topology = Topology::from_synthetic(ONE_NODE).unwrap();
    let plan = plan_workers(&topology, &PlanRequest::default()).unwrap();
    assert_eq!(plan.to_string(), "node 0: 4 workers on CPUs 0-3");
    assert_eq!(plan.notes, Vec::<String>::new());
}

#[test]
fn physical_cores_of_all_nodes_come_before_siblings() {
    let topology = Topology::from_synthetic(TWO_SOCKETS).unwrap();
    assert_eq!(topology.nodes[1].cores[0].cpus, cpus([18, 54]));
    let plan = |n| rows(&plan_workers(&topology, &threads(n)).unwrap());
    assert_eq!(plan(8), [(0, 4, "0-3".into()), (1, 4, "18-21".into())]);
    assert_eq!(plan(36), [(0, 18, "0-17".into()), (1, 18, "18-35".into())]);
    assert_eq!(plan(37), [(0, 19, "0-17,36".into()), (1, 18, "18-35".into())]);
    assert_eq!(plan(72), [(0, 36, "0-17,36-53".into()), (1, 36, "18-35,54-71".into())]);
    assert_eq!(rows(&plan_workers(&topology, &PlanRequest::default()).unwrap()), plan(36));
}

#[test]
fn siblings_numbered_next_to_each_other() {
    let topology = Topology::from_synthetic("pack:2 [numa] core:4 pu:2").unwrap();
    let plan = |n| rows(&plan_workers(&topology, &threads(n)).unwrap());
    assert_eq!(plan(8), [(0, 4, "0,2,4,6".into()), (1, 4, "8,10,12,14".into())]);
    assert_eq!(plan(9), [(0, 5, "0-2,4,6".into()), (1, 4, "8,10,12,14".into())]);
}

#[test]
fn more_threads_than_cpus_are_clamped_with_one_note() {
    let topology = Topology::from_synthetic(TWO_SOCKETS).unwrap();
    let plan = plan_workers(&topology, &threads(200)).unwrap();
    assert_eq!(plan.num_workers(), 72);
    assert_eq!(
        plan.notes,
        ["LK_THREADS=200 is more than the 72 CPUs (36 cores) of this process; 72 workers are started."]
    );
    let all = plan_workers(&topology, &threads(72)).unwrap();
    assert_eq!(all.notes.len(), 1, "{:?}", all.notes);
    assert!(all.notes[0].contains("36 workers run on SMT siblings"), "{:?}", all.notes);
    assert!(plan_workers(&topology, &threads(0)).unwrap_err().to_string().contains("LK_THREADS=0"));
}

#[test]
fn node_binding_gives_every_worker_all_cpus_of_its_node() {
    let topology = Topology::from_synthetic(TWO_SOCKETS).unwrap();
    let plan = plan_workers(&topology, &PlanRequest { binding: Binding::NumaNode, ..threads(5) }).unwrap();
    assert_eq!(plan.nodes[0].workers.len(), 3);
    assert!(plan.nodes[0].workers.iter().all(|w| w.cpus == cpus((0..18).chain(36..54))));
    assert_eq!(
        plan.to_string(),
        "node 0: 3 workers on any of CPUs 0-17,36-53\nnode 1: 2 workers on any of CPUs 18-35,54-71"
    );
}

#[test]
fn eight_nodes_with_a_number_of_threads_that_does_not_divide() {
    let topology = Topology::from_synthetic(NPS4).unwrap();
    assert_eq!(topology.nodes.len(), 8);
    let counts: Vec<usize> =
        plan_workers(&topology, &threads(20)).unwrap().nodes.iter().map(|n| n.workers.len()).collect();
    assert_eq!(counts, [3, 3, 3, 3, 2, 2, 2, 2]);
    let few = plan_workers(&topology, &threads(3)).unwrap();
    assert_eq!(rows(&few).iter().map(|r| r.0).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(few.notes, ["3 workers leave nodes 3-7 without any; they hold no weights."]);
}

#[test]
fn thirty_two_nodes() {
    let topology = Topology::from_synthetic("pack:8 group:4 [numa] core:4 pu:1").unwrap();
    let plan = plan_workers(&topology, &PlanRequest::default()).unwrap();
    assert_eq!(plan.nodes.len(), 32);
    assert_eq!(plan.num_workers(), 128);
}

/// Plans of all ranks, each as its own process would make it.
fn world(topology: &Topology, world: usize, request: &PlanRequest) -> Vec<WorkerPlan> {
    (0..world)
        .map(|rank| plan_workers(topology, &PlanRequest { rank, world, ..request.clone() }).unwrap())
        .collect()
}

#[test]
fn ranks_never_overlap_and_cover_all_nodes() {
    for (ranks, nodes) in [(1, 2), (2, 2), (2, 4), (4, 2), (3, 4), (8, 8), (2, 1), (5, 2)] {
        let topology = Topology::from_synthetic(&format!("pack:{nodes} [numa] core:6 pu:2")).unwrap();
        for reserve in [0, ranks] {
            let plans =
                world(&topology, ranks, &PlanRequest { reserve_cores: reserve, ..PlanRequest::default() });
            let mut seen = BTreeSet::new();
            let mut covered = BTreeSet::new();
            for plan in &plans {
                for cpu in cpu_set(plan) {
                    assert!(seen.insert(cpu), "{ranks} ranks, {nodes} nodes: CPU {cpu} twice");
                }
                covered.extend(plan.nodes.iter().map(|n| n.node));
                assert!(plan.notes.is_empty(), "{:?}", plan.notes);
            }
            assert_eq!(covered.len(), nodes, "{ranks} ranks, {nodes} nodes");
            assert_eq!(seen.len(), nodes * 6 - reserve);
        }
    }
}

#[test]
fn whole_nodes_per_rank_where_there_are_enough() {
    let topology = Topology::from_synthetic("pack:4 [numa] core:6 pu:1").unwrap();
    let of = |plans: &[WorkerPlan]| -> Vec<Vec<u32>> {
        plans.iter().map(|p| p.nodes.iter().map(|n| n.node.0).collect()).collect()
    };
    assert_eq!(of(&world(&topology, 2, &PlanRequest::default())), [vec![0, 1], vec![2, 3]]);
    assert_eq!(of(&world(&topology, 3, &PlanRequest::default())), [vec![0], vec![1], vec![2, 3]]);
    let gpus = |list: &[u32]| PlanRequest {
        gpu_nodes: list.iter().map(|&n| Some(NodeId(n))).collect(),
        ..PlanRequest::default()
    };
    // GPUs the other way round; GPUs on the last nodes; the odd node goes where it brings a GPU's node home.
    assert_eq!(of(&world(&topology, 2, &gpus(&[3, 0]))), [vec![3, 2], vec![0, 1]]);
    assert_eq!(of(&world(&topology, 2, &gpus(&[3, 3]))), [vec![1, 0], vec![3, 2]]);
    assert_eq!(of(&world(&topology, 3, &gpus(&[1, 2, 3]))), [vec![1, 0], vec![2], vec![3]]);
    assert_eq!(of(&world(&topology, 3, &gpus(&[0, 1, 2]))), [vec![0], vec![1], vec![2, 3]]);
    let notes = &world(&topology, 2, &gpus(&[3, 3]))[0].notes;
    assert_eq!(notes.len(), 1);
    assert!(notes[0].contains("GPU of rank 0 is on node 3"), "{notes:?}");
}

#[test]
fn own_gpu_node_orders_nodes_and_takes_the_reserved_core() {
    let topology = Topology::from_synthetic(TWO_SOCKETS).unwrap();
    let request = PlanRequest { gpu_node: Some(NodeId(1)), reserve_cores: 1, ..PlanRequest::default() };
    let plan = plan_workers(&topology, &request).unwrap();
    assert_eq!(rows(&plan), [(1, 17, "19-35".into()), (0, 18, "0-17".into())]);
    // An explicit number beyond that takes the reserved core before any sibling.
    let plan = plan_workers(&topology, &PlanRequest { threads: Some(36), ..request }).unwrap();
    assert_eq!(rows(&plan), [(1, 18, "18-35".into()), (0, 18, "0-17".into())]);
}

#[test]
fn reserve_leaves_at_least_one_worker() {
    let topology = Topology::from_synthetic("pack:1 core:1 pu:2").unwrap();
    let plan = plan_workers(&topology, &PlanRequest { reserve_cores: 1, ..PlanRequest::default() }).unwrap();
    assert_eq!(plan.num_workers(), 1);
    assert!(plan.notes[0].contains("No core can be left"), "{:?}", plan.notes);
}

#[test]
fn more_ranks_than_cores_use_siblings_then_share() {
    let topology = Topology::from_synthetic("pack:1 core:2 pu:2").unwrap();
    let plans = world(&topology, 4, &PlanRequest::default());
    let sets: Vec<Vec<u32>> = plans.iter().map(|p| cpu_set(p).into_iter().collect()).collect();
    assert_eq!(sets, [[0], [2], [1], [3]]);
    let plans = world(&topology, 5, &PlanRequest::default());
    assert!(
        plans.iter().all(|p| p.num_workers() == 1 && p.notes.iter().any(|n| n.contains("use fewer ranks")))
    );
    assert!(plan_workers(&topology, &PlanRequest { rank: 2, world: 2, ..PlanRequest::default() }).is_err());
}

#[test]
fn two_servers_are_separated_by_a_node_list() {
    let topology = Topology::from_synthetic(TWO_SOCKETS).unwrap();
    let server = |node| PlanRequest { nodes: Some(vec![NodeId(node)]), ..PlanRequest::default() };
    let first = cpu_set(&plan_workers(&topology, &server(0)).unwrap());
    let second = cpu_set(&plan_workers(&topology, &server(1)).unwrap());
    assert!(first.is_disjoint(&second));
    assert_eq!(first.len() + second.len(), 36);
}

#[test]
fn quota_caps_the_default_and_warns_about_an_explicit_number() {
    let mut topology = Topology::from_synthetic("pack:1 core:64 pu:1").unwrap();
    topology.quota_cpus = Some(4.0);
    let plan = plan_workers(&topology, &PlanRequest::default()).unwrap();
    assert_eq!(plan.num_workers(), 4);
    assert_eq!(plan.notes, ["A CFS quota of 4.0 CPUs limits rank 0 to 4 of 64 workers."]);
    let plan = plan_workers(&topology, &threads(64)).unwrap();
    assert_eq!(plan.num_workers(), 64);
    assert!(plan.notes[0].contains("exceeds the CFS quota of 4.0 CPUs"), "{:?}", plan.notes);
    assert!(plan_workers(&topology, &threads(4)).unwrap().notes.is_empty());
    let counts: Vec<usize> =
        world(&topology, 3, &PlanRequest::default()).iter().map(WorkerPlan::num_workers).collect();
    assert_eq!(counts, [2, 1, 1]);
    topology.quota_cpus = Some(0.5);
    assert_eq!(plan_workers(&topology, &PlanRequest::default()).unwrap().num_workers(), 1);
}

prop_compose! {
    fn any_topology()(
        nodes in prop::collection::vec((prop::collection::vec((1..=2usize, prop::bool::ANY), 1..12), 0..3u32), 1..9),
        quota in prop::option::weighted(0.3, 0.5..80.0f64),
    ) -> Topology {
        let (mut cpu, mut id) = (0, 0);
        let nodes = nodes.into_iter().map(|(cores, hole)| {
            let mut cores: Vec<Core> = cores.into_iter().map(|(smt, fast)| {
                let cpus = cpus(cpu..cpu + smt as u32);
                cpu += smt as u32;
                Core { cpus, capacity: if fast { 1024 } else { 600 } }
            }).collect();
            cores.sort_by_key(|c| (std::cmp::Reverse(c.capacity), c.cpus[0]));
            id += 1 + hole;
            NumaNode { id: NodeId(id - 1), memory_bytes: 1 << 30, cores }
        }).collect();
        Topology { nodes, quota_cpus: quota, notes: Vec::new() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Over all ranks: no CPU twice unless a node has fewer CPUs than ranks; every worker on an allowed CPU of its
    /// node; numbers by the rules; siblings only when the rank has no physical core left; nodes even.
    #[test]
    fn plan_rules(
        topology in any_topology(),
        world in 1..9usize,
        reserving in prop::bool::ANY,
        asked in prop::option::of(1..60usize),
        gpus in prop::collection::vec(prop::option::of(0..9usize), 8),
        know_gpus in prop::bool::ANY,
    ) {
        let count = topology.nodes.len();
        let gpu_nodes: Vec<Option<NodeId>> =
            gpus.iter().take(world).map(|g| g.map(|i| topology.nodes[i % count].id)).collect();
        let request = PlanRequest {
            threads: asked,
            reserve_cores: if reserving { world } else { 0 },
            gpu_nodes: if know_gpus { gpu_nodes } else { Vec::new() },
            ..PlanRequest::default()
        };
        let mut seen = BTreeSet::new();
        let mut covered = BTreeSet::new();
        let crowded = topology.nodes.iter().any(|n| {
            n.cores.iter().map(|c| c.cpus.len()).sum::<usize>() < world.div_ceil(count)
        });
        for rank in 0..world {
            let request = PlanRequest { rank, world, ..request.clone() };
            let plan = plan_workers(&topology, &request).unwrap();
            prop_assert!(plan.num_workers() >= 1);
            prop_assert!(plan.nodes.iter().all(|n| !n.workers.is_empty()));
            for node in &plan.nodes {
                covered.insert(node.node);
                let home = topology.nodes.iter().find(|n| n.id == node.node).unwrap();
                for worker in &node.workers {
                    prop_assert_eq!(worker.cpus.len(), 1);
                    prop_assert!(home.cores.iter().any(|c| c.cpus.contains(&worker.cpus[0])));
                    prop_assert!(seen.insert(worker.cpus[0]) || crowded, "{:?} twice", worker.cpus[0]);
                }
            }
            // The rank's whole share: what it takes when it is asked for more than there is.
            let most = plan_workers(&topology, &PlanRequest { threads: Some(100_000), ..request.clone() }).unwrap();
            let share = most.num_workers();
            if let Some(asked) = asked {
                prop_assert_eq!(plan.num_workers(), asked.min(share));
            } else if topology.quota_cpus.is_none() && !crowded && world <= count {
                let physical: usize = (topology.nodes.iter())
                    .filter(|n| most.nodes.iter().any(|m| m.node == n.id))
                    .map(|n| n.cores.len())
                    .sum();
                prop_assert_eq!(plan.num_workers(), (physical - usize::from(reserving && physical > 1)).max(1));
            }
            if let (Some(quota), None) = (topology.quota_cpus, asked) {
                prop_assert!(plan.num_workers() <= (quota as usize / world + 1).max(1));
            }
            if world <= count {
                // A sibling works only if all cores of the rank's nodes work already.
                let used: BTreeSet<CpuId> = plan.nodes.iter().flat_map(|n| &n.workers).map(|w| w.cpus[0]).collect();
                let cores = || topology.nodes.iter().filter(|n| most.nodes.iter().any(|m| m.node == n.id)).flat_map(|n| &n.cores);
                if cores().any(|c| c.cpus[1..].iter().any(|s| used.contains(s))) {
                    prop_assert!(cores().all(|c| used.contains(&c.cpus[0])));
                }
            }
        }
        if asked.is_none() && topology.quota_cpus.is_none() && !reserving {
            prop_assert_eq!(covered.len(), count);
        }
    }
}
