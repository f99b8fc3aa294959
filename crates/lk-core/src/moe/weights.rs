//! The packed experts of one layer in the arenas of the nodes that compute them.
#![expect(unsafe_code, reason = "reads arenas that intake has finished with")]

use crate::kernel::{Activation, KernelSet};
use crate::mem::NodeArena;
use crate::tile::TileLayout;

use super::scratch::PANEL;
use super::shard::ShardRule;
use super::spec::LayerSpec;
use crate::Result;

/// Layouts of the slices of one length and place in their scale groups.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slice {
    /// Rows of `intermediate_size`.
    pub(crate) rows: usize,
    /// Panels of gate (and, alike, of up): N = rows, K = `hidden_size`.
    pub(super) w13: TileLayout,
    /// Panels of w2: N = `hidden_size`, K = rows.
    pub(super) w2: TileLayout,
}

/// Where the parts of one expert lie in the arena, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// Index into [`NodeWeights::slices`], or `usize::MAX` where the node holds nothing of the expert.
    pub(super) slice: usize,
    /// First row of `intermediate_size`.
    pub(super) start: usize,
    /// Gate and up panels, alternating.
    pub(super) w13: usize,
    pub(super) w2: usize,
    /// f32 biases, each padded to whole panels; `usize::MAX` if there is none.
    pub(super) gate_bias: usize,
    pub(super) up_bias: usize,
    pub(super) w2_bias: usize,
}

impl Slot {
    /// Offset of a part that there is not.
    pub(super) const NONE: usize = usize::MAX;

    const EMPTY: Self = Self {
        slice: Self::NONE,
        start: 0,
        w13: Self::NONE,
        w2: Self::NONE,
        gate_bias: Self::NONE,
        up_bias: Self::NONE,
        w2_bias: Self::NONE,
    };

    pub(super) fn is_empty(&self) -> bool {
        self.slice == Self::NONE
    }
}

/// One node's part of a layer.
pub(crate) struct NodeWeights {
    pub(super) arena: NodeArena,
    pub(crate) slices: Vec<Slice>,
    slots: Vec<Slot>,
}

impl NodeWeights {
    /// Lays out the experts of `spec` that the node holds, in ascending order, each 64-byte aligned.
    pub(super) fn plan(
        spec: &LayerSpec,
        rule: &ShardRule,
        node: usize,
    ) -> Result<(Vec<Slice>, Vec<Slot>, usize)> {
        let mut slices: Vec<Slice> = Vec::new();
        let mut slots = Vec::with_capacity(spec.num_experts);
        let mut end = 0usize;
        let mut take = |bytes: usize| {
            let at = end;
            end = (end + bytes).next_multiple_of(64);
            at
        };
        for expert in 0..spec.num_experts {
            let range = rule.slice(expert, node);
            if range.is_empty() {
                slots.push(Slot::EMPTY);
                continue;
            }
            let wanted = Slice {
                rows: range.len(),
                w13: TileLayout::sliced(spec.format, range.len(), spec.hidden_size, range.start, 0)?,
                w2: TileLayout::sliced(spec.format, spec.hidden_size, range.len(), 0, range.start)?,
            };
            let slice = slices.iter().position(|s| *s == wanted).unwrap_or_else(|| {
                slices.push(wanted);
                slices.len() - 1
            });
            let Slice { w13, w2, .. } = &slices[slice];
            let bias = |wanted: bool, n: usize| {
                if wanted { n.next_multiple_of(PANEL) * size_of::<f32>() } else { 0 }
            };
            let gate_bias = bias(spec.w13_bias, range.len());
            let up_bias = bias(spec.w13_bias && spec.w13_shards() == 2, range.len());
            let w2_bias = bias(spec.w2_bias && rule.owns_w2_bias(expert, node), spec.hidden_size);
            let mut optional = |bytes: usize| if bytes == 0 { Slot::NONE } else { take(bytes) };
            let (gate_bias, up_bias, w2_bias) = (optional(gate_bias), optional(up_bias), optional(w2_bias));
            let w13_at = take(w13.bytes() * spec.w13_shards());
            let w2_at = take(w2.bytes());
            slots.push(Slot {
                slice,
                start: range.start,
                w13: w13_at,
                w2: w2_at,
                gate_bias,
                up_bias,
                w2_bias,
            });
        }
        Ok((slices, slots, end))
    }

    pub(super) fn new(arena: NodeArena, slices: Vec<Slice>, slots: Vec<Slot>) -> Self {
        Self { arena, slices, slots }
    }

    pub(super) fn slot(&self, expert: u32) -> &Slot {
        &self.slots[expert as usize]
    }

    /// Gate/up units (panels of `intermediate_size`) of an expert on this node.
    pub(super) fn units(&self, expert: u32) -> usize {
        let slot = self.slot(expert);
        if slot.is_empty() { 0 } else { self.slices[slot.slice].w13.panels() }
    }

    /// Columns that a row of `h` needs on this node.
    pub(super) fn h_columns(&self) -> usize {
        self.slices.iter().map(|s| s.w2.k_padded().max(s.rows.next_multiple_of(PANEL))).max().unwrap_or(0)
    }

    /// Gate and up panels of an expert together.
    pub(super) fn w13_panels(&self, slot: &Slot) -> usize {
        let slice = &self.slices[slot.slice];
        (slot.w2 - slot.w13) / slice.w13.panel_bytes()
    }

    /// The first expert that has slices of this kind.
    pub(super) fn template(&self, slice: usize) -> usize {
        self.slots.iter().position(|s| s.slice == slice).unwrap_or(0)
    }

    /// Bytes of the bias of `slot` that begins at `at`.
    pub(super) fn bias_bytes(&self, slot: &Slot, at: usize) -> usize {
        let slice = &self.slices[slot.slice];
        let n = if at == slot.w2_bias { slice.w2.n() } else { slice.rows };
        n.next_multiple_of(PANEL) * size_of::<f32>()
    }

    pub(super) fn panel(&self, at: usize, bytes: usize) -> &[u8] {
        // SAFETY: steps run on sealed layers only and hold the engine's scratch, which intake needs too; so nothing
        // writes the arena while this reference lives.
        unsafe { self.arena.slice(at, bytes) }
    }

    /// The whole arena.
    pub(super) fn bytes(&self) -> &[u8] {
        self.panel(0, self.arena.len())
    }

    fn bias(&self, at: usize, panel: usize) -> Option<&[u8]> {
        (at != Slot::NONE)
            .then(|| self.panel(at + panel * PANEL * size_of::<f32>(), PANEL * size_of::<f32>()))
    }

    pub(super) fn gate_bias(&self, slot: &Slot, unit: usize) -> Option<&[u8]> {
        self.bias(slot.gate_bias, unit)
    }

    pub(super) fn up_bias(&self, slot: &Slot, unit: usize) -> Option<&[u8]> {
        self.bias(slot.up_bias, unit)
    }

    pub(super) fn w2_bias(&self, slot: &Slot, panel: usize) -> Option<&[u8]> {
        self.bias(slot.w2_bias, panel)
    }
}

/// All nodes' parts and what the job must know of the layer.
pub(super) struct Weights {
    pub(super) hidden_size: usize,
    pub(super) activation: Activation,
    pub(super) weight_on_input: bool,
    pub(super) gate_up: KernelSet,
    pub(super) down: KernelSet,
    pub(super) nodes: Vec<NodeWeights>,
}

impl Weights {
    /// Elements that the kernels read of a row of `hidden_states`.
    pub(super) fn k_padded(&self) -> usize {
        self.nodes.iter().flat_map(|n| &n.slices).map(|s| s.w13.k_padded()).max().unwrap_or(0)
    }
}
