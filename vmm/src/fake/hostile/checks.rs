//! Reads the registers by way of configuration space, and checks the invariants.
use super::{FUNCTIONS, Function, Machine, QUEUES, Step, VECTORS, WINDOWS};
use crate::interrupt::MsiMessage;

const NOTIFY_PAGE: u64 = 0x3000;
const DRIVER_OK: u8 = 4;
const NEEDS_RESET: u8 = 64;

/// Register contents of a function.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    status: u8,
    /// Number of resets so far.
    resets: u64,
    bus_master: bool,
    /// True if MSI-X is on and the function mask is clear.
    msix: bool,
    vectors: Vec<Vector>,
    /// Vectors of the queues, then of the configuration.
    queue_vectors: Vec<u16>,
    /// Address of the notification page, if the function decodes it inside PCI's windows.
    notify: Option<u64>,
}

#[derive(Clone, Debug)]
struct Vector {
    masked: bool,
    pending: bool,
    message: MsiMessage,
}

impl View {
    fn is_held(&self, vector: usize) -> bool {
        let Vector {
            masked, message, ..
        } = &self.vectors[vector];
        !self.msix || !self.bus_master || *masked || message.address >> 20 != 0xfee
    }
}

impl Machine {
    /// Reads a register by way of configuration space.
    fn peek<const N: usize>(&self, function: &Function, bar: u8, offset: u32) -> [u8; N] {
        let at = function.base + u64::from(function.access);
        let mut aim = [bar, 0, 0, 0, 0, 0, 0, 0, N as u8, 0, 0, 0];
        aim[4..8].copy_from_slice(&offset.to_le_bytes());
        self.root.ecam_write(at + 4, &aim);
        self.config(function, function.access + 16)
    }

    pub(super) fn look(&self, at: usize) -> View {
        let function = &self.functions[at];
        let aim: [u8; 12] = self.config(function, function.access + 4);
        let [pending] = self.peek(function, 0, 0x1000);
        let vector = |vector: u16| {
            let entry = u32::from(vector) * 16;
            let dword = |at: u32| u32::from_le_bytes(self.peek(function, 0, entry + at));
            Vector {
                masked: dword(12) & 1 != 0,
                pending: pending >> vector & 1 != 0,
                message: MsiMessage {
                    address: u64::from(dword(4)) << 32 | u64::from(dword(0)),
                    data: dword(8),
                },
            }
        };
        let [status] = self.peek(function, 2, 20);
        let selected: [u8; 2] = self.peek(function, 2, 22);
        let queue_vector = |queue: u16| {
            self.poke(function, 22, &queue.to_le_bytes());
            u16::from_le_bytes(self.peek(function, 2, 26))
        };
        let mut queue_vectors: Vec<u16> = (0..QUEUES).map(queue_vector).collect();
        self.poke(function, 22, &selected);
        queue_vectors.push(u16::from_le_bytes(self.peek(function, 2, 16)));
        let vectors = (0..VECTORS).map(vector).collect();
        self.root
            .ecam_write(function.base + u64::from(function.access) + 4, &aim);
        let [command, _, _, _] = self.config(function, 4);
        let control = u16::from_le_bytes(self.config(function, function.msix + 2));
        let (bar, len) = (self.bar(function, 2), 0x4000);
        let inside = WINDOWS.mmio64.start <= bar && bar <= WINDOWS.mmio64.end - len
            || WINDOWS.mmio32.start <= bar && bar <= WINDOWS.mmio32.end - len;
        View {
            status,
            resets: function.counters.snapshot().resets,
            bus_master: command & 4 != 0,
            msix: control >> 14 == 0b10,
            vectors,
            queue_vectors,
            notify: (command & 2 != 0 && inside).then_some(bar + NOTIFY_PAGE),
        }
    }

    /// Writes two bytes of the common configuration by way of configuration space.
    fn poke(&self, function: &Function, offset: u32, bytes: &[u8; 2]) {
        self.peek::<2>(function, 2, offset);
        let data = function.base + u64::from(function.access) + 16;
        self.root.ecam_write(data, bytes);
    }

    pub(super) fn check(&self, at: usize, after: &View, step: &Step) {
        let Function {
            witness, before, ..
        } = &self.functions[at];
        let is_active = {
            let seen = witness.seen();
            let is_active = seen.activation.is_some();
            assert_eq!(
                seen.activations,
                seen.resets + u64::from(is_active),
                "they alternate"
            );
            is_active
        };
        let status = after.status;
        // ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK: none is set without those before it.
        let steps = status & 15;
        assert!(
            [0, 1, 3, 11, 15].contains(&steps),
            "status {status:#x} after {step:?}"
        );
        assert_eq!(status & 0x30, 0);
        if is_active {
            assert!(
                steps == 15 && after.bus_master,
                "active in {after:?} after {step:?}"
            );
        }
        if status & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK {
            assert!(is_active, "{after:?} after {step:?}");
        }
        for vector in 0..usize::from(VECTORS) {
            let line = at as u16 * VECTORS + vector as u16;
            let (interrupts, message) = self.fabric.take(line);
            let (was, is) = (&before.vectors[vector], &after.vectors[vector]);
            let held = after.is_held(vector);
            assert!(!is.pending || held, "pending and not held after {step:?}");
            assert!(interrupts <= 2, "{interrupts} interrupts of one {step:?}");
            // Its many writes reach the vectors' table too, if the guest has moved one area over the other:
            // a vector may be held before and after them, and not in between.
            let is_one_access = !matches!(step, Step::BringUp(..));
            if interrupts > 0 && is_one_access {
                assert!(
                    !held || !before.is_held(vector),
                    "{vector} was held in {step:?}"
                );
                assert!(message == Some(is.message) || message == Some(was.message));
            }
            if was.pending && !is.pending {
                assert!(
                    interrupts > 0 || after.resets > before.resets,
                    "{vector} was lost in {step:?}"
                );
            }
            if let Step::Signal(function, queue) = step
                && usize::from(function % FUNCTIONS) == at
                && is_active
                && after.queue_vectors.get(usize::from(*queue)) == Some(&(vector as u16))
            {
                let expected = if held { (0, true) } else { (1, false) };
                assert_eq!((interrupts, is.pending), expected, "{step:?}");
            }
        }
    }

    pub(super) fn check_bells(&mut self) {
        let is_active = |function: &&Function| function.witness.seen().activation.is_some();
        let pages = self
            .functions
            .iter()
            .filter(is_active)
            .filter_map(|f| f.before.notify);
        let pages: Vec<u64> = pages.collect();
        let mut expected: Vec<u64> = pages
            .iter()
            .flat_map(|page| (0..u64::from(QUEUES)).map(move |queue| page + 4 * queue))
            .collect();
        expected.sort_unstable();
        if let [first, second] = pages[..] {
            self.overlapped |= first == second;
        }
        let bells = self.fabric.bells();
        if self.overlapped {
            assert!(
                bells.iter().all(|bell| expected.contains(bell)),
                "{bells:x?}"
            );
        } else {
            assert_eq!(bells, expected);
        }
    }
}
