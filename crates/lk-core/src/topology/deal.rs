//! Dealing nodes and cores to tensor-parallel ranks. Every rank computes the same deal from the same
//! facts, so that pools of different processes never overlap without any talk between them.

use super::plan::PlanRequest;
use super::types::{Core, CpuId, NodeId, NumaNode};

/// The cores of one node that belong to a rank.
#[derive(Debug)]
pub(super) struct Share {
    pub node: NodeId,
    /// Fastest kind first.
    pub cores: Vec<Core>,
}

/// The shares of `request.rank`, nearest to its GPU first, none without cores.
pub(super) fn deal(nodes: &[&NumaNode], request: &PlanRequest, notes: &mut Vec<String>) -> Vec<Share> {
    let order = rank_order(nodes, request);
    let place = order.iter().position(|&r| r == request.rank).unwrap_or(request.rank);
    let (world, count) = (request.world, nodes.len());
    let mut shares: Vec<Share> = if world <= count {
        let (start, end) = blocks(nodes, request, &order)[place];
        nodes[start..end].iter().map(|n| Share { node: n.id, cores: n.cores.clone() }).collect()
    } else {
        // Ranks in order, spread evenly: place p is on node p·count/world.
        let node = place * count / world;
        let first = (0..world).find(|p| p * count / world == node).unwrap_or(0);
        let sharers = (0..world).filter(|p| p * count / world == node).count();
        vec![Share { node: nodes[node].id, cores: split(nodes[node], sharers, place - first, notes) }]
    };
    if let Some(gpu) = request.own_gpu_node() {
        shares.sort_by_key(|s| (s.node.0.abs_diff(gpu.0), s.node));
        if nodes.iter().any(|n| n.id == gpu) && shares.iter().all(|s| s.node != gpu) {
            notes.push(format!(
                "The GPU of rank {} is on node {}, its workers are on node {}: nodes are dealt evenly over {} ranks.",
                request.rank, gpu.0, shares[0].node.0, world
            ));
        }
    }
    shares
}

/// Ranks in the order in which they get nodes: by their GPU's node, so that contiguous blocks of nodes lie as
/// near to the GPUs as an even deal allows. A rank whose GPU's node is unknown keeps its own place.
fn rank_order(nodes: &[&NumaNode], request: &PlanRequest) -> Vec<usize> {
    let mut order: Vec<usize> = (0..request.world).collect();
    order.sort_by_key(|&r| position(nodes, request, r).unwrap_or(r * nodes.len() / request.world));
    order
}

/// Index into `nodes` of a rank's GPU's node, if the nodes of all GPUs were given.
fn position(nodes: &[&NumaNode], request: &PlanRequest, rank: usize) -> Option<usize> {
    let gpu = (*request.gpu_nodes.get(rank)?)?;
    nodes.iter().position(|n| n.id == gpu)
}

/// Cuts `nodes` into one contiguous block per rank, sizes differing by at most one, such that the blocks lie
/// nearest to the GPUs in sum. `best[i][e]`: least distance of the first i ranks, e of which got a larger block.
fn blocks(nodes: &[&NumaNode], request: &PlanRequest, order: &[usize]) -> Vec<(usize, usize)> {
    let (world, count) = (request.world, nodes.len());
    let (base, extras) = (count / world, count % world);
    let mut best = vec![vec![usize::MAX; extras + 1]; world + 1];
    let mut larger = vec![vec![false; extras + 1]; world + 1];
    best[0][0] = 0;
    for i in 0..world {
        for e in 0..=extras.min(i) {
            if best[i][e] == usize::MAX {
                continue;
            }
            let start = i * base + e;
            for plus in [1, 0] {
                let end = start + base + plus;
                if e + plus > extras || end > count {
                    continue;
                }
                let distance = position(nodes, request, order[i])
                    .map_or(0, |p| if p < start { start - p } else { (p + 1).saturating_sub(end) });
                let total = best[i][e] + distance;
                if total < best[i + 1][e + plus] {
                    best[i + 1][e + plus] = total;
                    larger[i + 1][e + plus] = plus == 1;
                }
            }
        }
    }
    let mut cuts = vec![(0, 0); world];
    let mut e = extras;
    for i in (0..world).rev() {
        let plus = usize::from(larger[i + 1][e]);
        e -= plus;
        cuts[i] = (i * base + e, i * base + e + base + plus);
    }
    cuts
}

/// The cores of `node` for the `index`-th of `sharers` ranks: of every kind of core a contiguous part, totals
/// differing by at most one. With fewer cores than ranks logical CPUs are dealt, with fewer of those they are shared.
fn split(node: &NumaNode, sharers: usize, index: usize, notes: &mut Vec<String>) -> Vec<Core> {
    if sharers <= node.cores.len() {
        return split_by_kind(&node.cores, sharers, index);
    }
    let siblings = (node.cores.iter()).map(|c| c.cpus.len()).max().unwrap_or(0);
    let one = |core: &Core, cpu: CpuId| Core { cpus: vec![cpu], capacity: core.capacity };
    let logical: Vec<Core> = (0..siblings)
        .flat_map(|s| node.cores.iter().filter_map(move |c| c.cpus.get(s).map(|&cpu| one(c, cpu))))
        .collect();
    if sharers <= logical.len() {
        notes.push(format!(
            "{sharers} ranks share the {} cores of node {}: some work on SMT siblings of one core.",
            node.cores.len(),
            node.id.0
        ));
        return split_by_kind(&logical, sharers, index);
    }
    notes.push(format!(
        "{sharers} ranks share the {} CPUs of node {}: workers of different ranks take turns on one CPU, which is slow; use fewer ranks or allow more CPUs.",
        logical.len(),
        node.id.0
    ));
    vec![logical[index % logical.len()].clone()]
}

/// `cores` are in order of kind. Each kind is cut into contiguous parts; its odd ones go to those with the fewest so far.
fn split_by_kind(cores: &[Core], sharers: usize, index: usize) -> Vec<Core> {
    let mut totals = vec![0; sharers];
    let mut own = Vec::new();
    for kind in cores.chunk_by(|a, b| a.capacity == b.capacity) {
        let mut takers: Vec<usize> = (0..sharers).collect();
        takers.sort_by_key(|&s| (totals[s], s));
        takers.truncate(kind.len() % sharers);
        let mut start = 0;
        for (sharer, total) in totals.iter_mut().enumerate() {
            let len = kind.len() / sharers + usize::from(takers.contains(&sharer));
            if sharer == index {
                own.extend_from_slice(&kind[start..start + len]);
            }
            start += len;
            *total += len;
        }
    }
    own
}
