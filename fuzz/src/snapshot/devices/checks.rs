//! What must be true of devices that go on: what they have taken is given back once, and a device that
//! has nothing to do comes to no other state in another machine.
use slipgate_vmm::snapshot::{FunctionState, Progress, QueueState, TransportState};

use super::{BALLOON, DISK, NET, PAIRS, VSOCK};

/// Queues that give back what they are offered, without anything from outside.
pub(crate) const SERVED: [(u8, u16); 8] = [
    (NET, 1),
    (NET, 3),
    (NET, 2 * PAIRS as u16),
    (DISK, 0),
    (DISK, 1),
    (VSOCK, 1),
    (BALLOON, 0),
    (BALLOON, 1),
];

/// A queue that is served: its registers, and how far the device has come.
#[derive(Clone, Copy)]
struct Served<'a> {
    number: (u8, u16),
    registers: &'a QueueState,
    progress: &'a Progress,
}

/// Returns whether a queue still has chains that were offered, of devices that go on from `begun`.
/// `now`: their states at present, which say which of them need a reset.
pub(super) fn waits(begun: &[FunctionState], now: &[FunctionState], memory: &[u8]) -> bool {
    let mut queues = served(begun).filter(|queue| SERVED.contains(&queue.number));
    queues.any(|queue| {
        let (Some(open), Some(used)) = (queue.open(memory), queue.used(memory)) else {
            return false;
        };
        let given_back = used.wrapping_sub(queue.progress.next_used);
        !needs_reset(now, queue.number.0) && usize::from(given_back) < open.len()
    })
}

/// Checks that as many chains as were taken were given back or are still taken.
pub(super) fn none_lost(before: &[FunctionState], after: &[FunctionState]) {
    for then in served(after) {
        // Whoever wrote the first state may have it begin with too few or too many.
        if let Some(begun) = find(before, then.number) {
            let number = then.number;
            assert_eq!(
                begun.unaccounted(),
                then.unaccounted(),
                "queue {number:?} went from {:?} to {:?}",
                begun.progress,
                then.progress
            );
        }
    }
}

/// Checks that devices which had served all came to nothing else in another machine, where they went on
/// from `saved` with `memory` to `again` with `memory_again`.
pub(super) fn the_same(
    saved: &[FunctionState],
    again: &[FunctionState],
    memory: &[u8],
    memory_again: &[u8],
) {
    // A chain that is open in any queue may be served, or found to be invalid, by the second machine
    // and not yet by the first: threads serve queues at their own pace.
    let has_served = served(saved).all(|queue| queue.open(memory).is_some_and(|it| it.is_empty()));
    if !has_served || overlap(saved) {
        return;
    }
    for (number, (saved, again)) in (0..).zip(saved.iter().zip(again)) {
        let (Some(saved), Some(again)) = (&saved.transport, &again.transport) else {
            assert_eq!(saved.transport, again.transport, "function {number}");
            continue;
        };
        let driver = |state: &TransportState| (state.status, state.features, state.queues.clone());
        assert_eq!(driver(saved), driver(again), "function {number}");
        let model = |state: &TransportState| state.device.as_ref().map(|it| it.model.clone());
        assert_eq!(model(saved), model(again), "function {number}");
    }
    for queue in served(saved) {
        let other = find(again, queue.number);
        let now = other.map(|other| (other.open(memory_again), other.progress.next_used));
        let due = (queue.open(memory), queue.progress.next_used);
        assert_eq!(now, Some(due), "queue {:?}", queue.number);
    }
}

/// Returns whether a queue has more chains taken than it has entries.
pub(super) fn is_overfull(states: &[FunctionState]) -> bool {
    served(states).any(|queue| queue.progress.taken.len() > usize::from(queue.registers.size))
}

/// Returns whether parts of the rings lie upon others: what a device writes there is offered anew.
fn overlap(states: &[FunctionState]) -> bool {
    let mut parts: Vec<_> = served(states).flat_map(|queue| queue.parts()).collect();
    parts.sort_unstable();
    parts.windows(2).any(|pair| pair[0].1 > pair[1].0)
}

fn needs_reset(states: &[FunctionState], function: u8) -> bool {
    let transport = states[usize::from(function)].transport.as_ref();
    transport.is_none_or(|it| it.status & 64 != 0)
}

/// Returns the queues that are served, in the devices' states.
fn served(states: &[FunctionState]) -> impl Iterator<Item = Served<'_>> {
    let functions = (0..).zip(states);
    let transports = functions.filter_map(|(number, it)| Some((number, it.transport.as_ref()?)));
    transports.flat_map(|(number, transport)| {
        let progress = transport.device.iter().flat_map(|device| &device.queues);
        progress.filter_map(move |progress| {
            let registers = transport.queues.get(usize::from(progress.queue))?;
            let number = (number, progress.queue);
            registers.enabled.then_some(Served {
                number,
                registers,
                progress,
            })
        })
    })
}

fn find(states: &[FunctionState], number: (u8, u16)) -> Option<Served<'_>> {
    served(states).find(|queue| queue.number == number)
}

impl Served<'_> {
    /// Number of chains that were taken and are neither given back nor said to be taken.
    fn unaccounted(&self) -> u16 {
        let Progress {
            next_available,
            next_used,
            taken,
            ..
        } = self.progress;
        let missing = next_available.wrapping_sub(*next_used);
        missing.wrapping_sub(taken.len() as u16)
    }

    /// Returns the chains that are to be given back, in the order in which they are served; `None`: the
    /// ring says nothing that can be.
    fn open(&self, memory: &[u8]) -> Option<Vec<u16>> {
        let [_, available, _] = self.registers.rings;
        let index = half(memory, available.checked_add(2)?)?;
        let waiting = index.wrapping_sub(self.progress.next_available);
        if waiting > self.registers.size {
            return None;
        }
        let offered = (0..waiting).map(|number| {
            let entry = self.progress.next_available.wrapping_add(number) % self.registers.size;
            half(memory, available.checked_add(4 + 2 * u64::from(entry))?)
        });
        let taken = self.progress.taken.iter().copied().map(Some);
        taken.chain(offered).collect()
    }

    /// Index of the used ring.
    fn used(&self, memory: &[u8]) -> Option<u16> {
        half(memory, self.registers.rings[2].checked_add(2)?)
    }

    /// Begins and ends of the queue's parts.
    fn parts(&self) -> [(u64, u64); 3] {
        let entries = u64::from(self.registers.size);
        let [descriptors, available, used] = self.registers.rings;
        [
            (descriptors, 16 * entries),
            (available, 6 + 2 * entries),
            (used, 6 + 8 * entries),
        ]
        .map(|(at, bytes)| (at, at.saturating_add(bytes)))
    }
}

fn half(memory: &[u8], at: u64) -> Option<u16> {
    let at = usize::try_from(at).ok()?;
    let bytes = memory.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}
