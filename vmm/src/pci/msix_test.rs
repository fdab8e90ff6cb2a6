use proptest::prelude::*;

use super::*;
use crate::{
    fake::Fabric,
    pci::config::{COMMAND, Identity},
};

struct Rig {
    fabric: Arc<Fabric>,
    config: ConfigSpace,
    msix: Msix,
}

fn message(data: u32) -> MsiMessage {
    MsiMessage {
        address: 0xfee0_1000,
        data,
    }
}

impl Rig {
    fn new(vectors: u16) -> Self {
        let fabric = Arc::new(Fabric::default());
        let mut config = ConfigSpace::new(Identity {
            vendor: 1,
            device: 2,
            revision: 0,
            class: 0,
            subsystem_vendor: 0,
            subsystem: 0,
        });
        let mut msix = Msix::new(vectors, fabric.clone()).unwrap();
        msix.add_capability(&mut config, 3, 0x1000, 0x2000);
        Self {
            fabric,
            config,
            msix,
        }
    }

    fn control(&mut self, enabled: bool, masked: bool, bus_master: bool) {
        let control = u16::from(enabled) << 15 | u16::from(masked) << 14;
        self.config.write(0x42, &control.to_le_bytes());
        self.config
            .write(COMMAND as u16, &[u8::from(bus_master) << 2]);
        self.msix.follow(&self.config);
    }

    fn program(&mut self, vector: u64, message: MsiMessage) {
        self.msix
            .table_write(16 * vector, &message.address.to_le_bytes());
        self.msix
            .table_write(16 * vector + 8, &message.data.to_le_bytes());
    }

    fn mask(&mut self, vector: u64, masked: bool) {
        self.msix
            .table_write(16 * vector + 12, &u32::from(masked).to_le_bytes());
    }

    fn pending(&self, vector: u16) -> bool {
        let mut byte = [0];
        self.msix.pba_read(u64::from(vector / 8), &mut byte);
        byte[0] >> (vector % 8) & 1 != 0
    }
}

#[test]
fn the_capability_says_where_things_are() {
    let rig = Rig::new(34);
    let mut bytes = [0; 12];
    rig.config.read(0x40, &mut bytes);
    assert_eq!(bytes, [0x11, 0, 33, 0, 3, 0x10, 0, 0, 3, 0x20, 0, 0]);
    assert_eq!((rig.msix.table_len(), rig.msix.pba_len()), (544, 8));
    assert_eq!(Rig::new(65).msix.pba_len(), 16);
}

#[test]
fn all_that_holds_a_vector() {
    let mut rig = Rig::new(2);
    rig.program(1, message(7));
    rig.mask(1, false);
    let vectors = rig.msix.vectors().clone();
    for (enabled, masked, bus_master) in [
        (false, false, true),
        (true, true, true),
        (true, false, false),
    ] {
        rig.control(enabled, masked, bus_master);
        vectors.signal(1);
        assert!(rig.pending(1));
        assert_eq!(rig.fabric.take(1).0, 0);
        rig.control(true, false, true);
        assert_eq!(rig.fabric.take(1), (1, Some(message(7))));
        assert!(!rig.pending(1));
    }
    rig.mask(1, true);
    vectors.signal(1);
    assert_eq!(rig.fabric.take(1).0, 0);
    rig.mask(1, false);
    assert_eq!(rig.fabric.take(1).0, 1);
}

/// Another process writes the eventfd, whatever holds the vector.
#[test]
fn a_vector_that_is_shared_keeps_what_is_signalled_while_it_is_held() {
    let mut rig = Rig::new(2);
    rig.msix.share().unwrap();
    let vectors = rig.msix.vectors().clone();
    let signal = || vectors.line(1).unwrap().write(1).unwrap();
    signal();
    assert!(rig.pending(1) && !rig.pending(0));
    rig.program(1, message(7));
    rig.mask(1, false);
    assert_eq!(rig.fabric.take(1).0, 0, "MSI-X is off");
    rig.control(true, false, true);
    assert_eq!(rig.fabric.take(1), (1, Some(message(7))));
    assert!(!rig.pending(1));
    signal();
    assert_eq!(rig.fabric.take(1).0, 1);
    rig.mask(1, true);
    signal();
    assert_eq!(rig.fabric.take(1).0, 0);
    assert!(rig.pending(1));
    assert_eq!(rig.msix.state().pending, [1]);
    rig.mask(1, false);
    assert_eq!(rig.fabric.take(1).0, 1);
    // A reset forgets.
    rig.mask(1, true);
    signal();
    rig.msix.forget_pending();
    assert!(!rig.pending(1));
    rig.mask(1, false);
    assert_eq!(rig.fabric.take(1).0, 0);
    assert!(vectors.line(2).is_none());
}

#[test]
fn a_line_that_can_not_be_held_is_counted_and_told() {
    let mut rig = Rig::new(1);
    rig.fabric.refuse_holds();
    rig.msix.share().unwrap_err();
    assert_eq!(rig.msix.refused().load(Relaxed), 1);

    let mut rig = Rig::new(1);
    rig.msix.share().unwrap();
    rig.control(true, false, true);
    rig.program(0, message(7));
    rig.fabric.refuse_holds();
    let line = rig.msix.vectors().line(0).unwrap().try_clone().unwrap();
    line.write(1).unwrap();
    rig.mask(0, false);
    assert_eq!(rig.msix.refused().load(Relaxed), 1);
    assert!(rig.pending(0), "it waits for a line");
}

#[test]
fn routes_are_told_only_when_they_change() {
    let mut rig = Rig::new(2);
    rig.control(true, false, true);
    rig.program(0, message(1));
    assert_eq!(rig.fabric.routes(), 0, "masked: not yet");
    for _ in 0..10 {
        rig.mask(0, false);
        rig.mask(0, true);
        rig.control(true, true, true);
        rig.control(true, false, true);
    }
    assert_eq!(rig.fabric.routes(), 1);
    rig.program(0, message(2));
    rig.program(0, message(1));
    rig.mask(0, false);
    assert_eq!(
        rig.fabric.routes(),
        1,
        "what was written in between was never in force"
    );
    rig.program(0, message(3));
    assert_eq!(rig.fabric.routes(), 2, "at once while unmasked");
    assert_eq!(rig.fabric.take(0).1, Some(message(3)));
}

#[test]
fn a_message_to_nowhere_leaves_the_vector_pending() {
    let mut rig = Rig::new(1);
    rig.control(true, false, true);
    rig.program(
        0,
        MsiMessage {
            address: 0x1000,
            data: 1,
        },
    );
    rig.mask(0, false);
    rig.msix.vectors().signal(0);
    assert!(rig.pending(0));
    assert_eq!(rig.fabric.take(0).0, 0);
    assert_eq!(rig.msix.refused().load(Relaxed), 1);
    rig.program(0, message(5));
    assert_eq!(rig.fabric.take(0), (1, Some(message(5))));
}

#[test]
fn reserved_bits_stay_zero() {
    let mut rig = Rig::new(2);
    rig.msix.table_write(0, &[0xff; 16]);
    let mut entry = [0; 17];
    rig.msix.table_read(0, &mut entry);
    assert_eq!(entry[0], 0xfc);
    assert_eq!(entry[12..], [1, 0, 0, 0, 0]);
    rig.msix.table_write(31, &[0xff; 8]);
    rig.msix.table_read(30, &mut entry);
    assert_eq!(entry, [0; 17]);
}

#[test]
fn pending_bits_beyond_a_qword() {
    let rig = Rig::new(70);
    rig.msix.vectors().signal(69);
    let mut pba = [0; 16];
    rig.msix.pba_read(0, &mut pba);
    assert_eq!(u128::from_le_bytes(pba), 1 << 69);
    rig.msix.pba_read(1 << 13, &mut pba);
    assert_eq!(pba, [0; 16], "past the last vector that can be");
}

#[test]
fn lines_are_given_back() {
    let rig = Rig::new(5);
    assert_eq!(rig.fabric.lines(), 5);
    drop(rig.msix);
    assert_eq!(rig.fabric.lines(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Control(bool, bool, bool),
    Table(u64, Vec<u8>),
    Mask(u16, bool),
    Program(u16, u32),
    Signal(u16),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let vector = 0..3_u16;
    prop_oneof![
        2 => (any::<bool>(), any::<bool>(), prop::bool::weighted(0.9))
            .prop_map(|(enabled, masked, master)| Step::Control(enabled, masked, master)),
        1 => (0..50_u64, prop::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(at, bytes)| Step::Table(at, bytes)),
        2 => (vector.clone(), any::<bool>())
            .prop_map(|(vector, masked)| Step::Mask(vector, masked)),
        2 => (vector.clone(), 0..4_u32)
            .prop_map(|(vector, data)| Step::Program(vector, data)),
        4 => vector.prop_map(Step::Signal),
        1 => Just(Step::Reset),
    ]
}

proptest! {
    /// Compares with a model of the specification's text: whether each vector may interrupt,
    /// whether it is pending, and how often it interrupted with which message.
    #[test]
    fn like_the_specification(steps in prop::collection::vec(step(), 0..80)) {
        let mut rig = Rig::new(3);
        let mut table = [RESET_ENTRY; 3];
        let (mut on, mut pending) = ((false, false, false), [false; 3]);
        for step in steps {
            let mut sent = [0; 3];
            match step.clone() {
                Step::Control(enabled, masked, master) => {
                    rig.control(enabled, masked, master);
                    on = (enabled, masked, master);
                }
                Step::Table(at, bytes) => {
                    rig.msix.table_write(at, &bytes);
                    for (at, byte) in (at as usize..48).zip(bytes) {
                        let mask = WRITABLE[at % 16];
                        table[at / 16][at % 16] = byte & mask;
                    }
                }
                Step::Mask(vector, masked) => {
                    rig.mask(vector.into(), masked);
                    table[usize::from(vector)][12] = masked.into();
                }
                Step::Program(vector, data) => {
                    rig.program(vector.into(), message(data));
                    let entry = &mut table[usize::from(vector)];
                    entry[..8].copy_from_slice(&message(data).address.to_le_bytes());
                    entry[8..12].copy_from_slice(&data.to_le_bytes());
                }
                Step::Signal(vector) => {
                    rig.msix.vectors().signal(vector);
                    pending[usize::from(vector)] = true;
                }
                Step::Reset => {
                    rig.config.reset();
                    rig.msix.reset(&rig.config);
                    table = [RESET_ENTRY; 3];
                    (on, pending) = ((false, false, false), [false; 3]);
                }
            }
            for vector in 0..3 {
                let entry = &table[vector];
                let address = u64::from_le_bytes(entry[..8].try_into().unwrap());
                let may = on == (true, false, true) && entry[12] == 0 && address >> 20 == 0xfee;
                if may && pending[vector] {
                    pending[vector] = false;
                    sent[vector] = 1;
                }
                let number = vector as u16;
                let (interrupts, routed) = rig.fabric.take(number);
                prop_assert_eq!(interrupts, sent[vector], "{:?}", step);
                prop_assert_eq!(rig.pending(number), pending[vector], "{:?}", step);
                if may {
                    let data = u32::from_le_bytes(entry[8..12].try_into().unwrap());
                    prop_assert_eq!(routed, Some(MsiMessage { address, data }));
                }
                let mut read = [0; 16];
                rig.msix.table_read(16 * vector as u64, &mut read);
                prop_assert_eq!(&read, entry);
            }
        }
    }
}
