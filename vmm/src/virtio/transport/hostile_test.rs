//! Random sequences of all that a guest and a device can do: see [`crate::fake::hostile`].
use proptest::prelude::*;

use crate::fake::hostile::{FEATURES, Machine, Step};

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        3 => prop::sample::select(vec![0, 1, 2, 3, 4, 8, 15, 0x80, 0xff]),
        1 => any::<u8>(),
    ];
    prop::collection::vec(byte, 1..9)
}

/// Offsets of registers in configuration space, of functions that exist and of one that does not.
fn config() -> impl Strategy<Value = u64> {
    let register = prop_oneof![
        prop::sample::select(vec![4, 0x10, 0x18, 0x1c, 0x42]),
        0x40..0xb8_u64,
        0..0x1000_u64,
    ];
    (1..4_u64, register).prop_map(|(device, register)| device << 15 | register)
}

/// Addresses that a hostile guest may move a BAR to.
fn place() -> impl Strategy<Value = u64> {
    let window = prop::sample::select(vec![1_u64 << 36, 0xc000_0000, 0, 0xfee0_0000, 1 << 62]);
    (window, 0..4_u64).prop_map(|(window, slot)| window + slot * 0x4000)
}

fn common() -> impl Strategy<Value = (u64, Vec<u8>)> {
    let widths = vec![
        (8, 4),
        (12, 4),
        (16, 2),
        (22, 2),
        (24, 2),
        (26, 2),
        (28, 2),
        (32, 8),
        (40, 4),
        (58, 2),
    ];
    let natural = (prop::sample::select(widths), 0..4_u8).prop_map(|((at, len), value)| {
        let mut bytes = vec![0; len];
        bytes[0] = value;
        (at, bytes)
    });
    let status = prop::sample::select(vec![0, 1, 3, 11, 15, 0x8f, 0xff]);
    prop_oneof![
        4 => natural,
        2 => status.prop_map(|status| (20, vec![status])),
        1 => (0..64_u64, bytes()),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let (function, len) = (0..2_u8, 1..9_usize);
    let features = prop::sample::select(vec![FEATURES | 1 << 32, 1 << 32, FEATURES, 2 | 1 << 32]);
    let size = prop::sample::select(vec![16_u16, 8, 1, 0, 3, 32]);
    let config_size = 0xff_u64;
    prop_oneof![
        4 => (config(), bytes()).prop_map(|(at, bytes)| Step::Ecam(at, bytes)),
        1 => (config(), len.clone()).prop_map(|(at, len)| Step::EcamRead(at, len)),
        1 => (0..8_u16, bytes()).prop_map(|(port, bytes)| Step::Port(port, bytes)),
        1 => (0..8_u16, len.clone()).prop_map(|(port, len)| Step::PortRead(port, len)),
        2 => (1..3_u64, place()).prop_map(|(device, place)| {
            Step::Ecam(device << 15 | 0x18, place.to_le_bytes().to_vec())
        }),
        2 => (1..3_u64, 0..8_u8).prop_map(|(device, bits)| Step::Ecam(device << 15 | 4, vec![bits])),
        8 => (function.clone(), common())
            .prop_map(|(function, (at, bytes))| Step::Bar(function, 2, at, bytes)),
        3 => (function.clone(), 0..80_u64, bytes())
            .prop_map(|(function, at, bytes)| Step::Bar(function, 0, at, bytes)),
        2 => (function.clone(), prop::sample::select(vec![0, 2_u8]), 0..0x4010_u64, bytes())
            .prop_map(|(function, bar, at, bytes)| Step::Bar(function, bar, at, bytes)),
        2 => (function.clone(), prop::sample::select(vec![0, 2_u8]), 0..0x4010_u64, len)
            .prop_map(|(function, bar, at, len)| Step::BarRead(function, bar, at, len)),
        1 => (place(), 0..config_size, bytes())
            .prop_map(|(place, at, bytes)| Step::Mmio(place + at, bytes)),
        4 => (function.clone(), features, any::<u8>(), size).prop_map(
            |(function, features, queues, size)| Step::BringUp(function, features, queues, size)),
        4 => (function.clone(), 0..4_u8, any::<u8>())
            .prop_map(|(function, vector, data)| Step::Message(function, vector, data)),
        6 => (function.clone(), 0..5_u16).prop_map(|(function, queue)| Step::Signal(function, queue)),
        1 => function.clone().prop_map(Step::NeedsReset),
        1 => (0..0x3000_u32, bytes()).prop_map(|(at, bytes)| Step::Memory(at, bytes)),
        2 => (function.clone(), 0..3_u16).prop_map(|(function, queue)| Step::Serve(function, queue)),
        1 => function.prop_map(Step::Refuse),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn whatever_the_guest_does(steps in prop::collection::vec(step(), 1..120)) {
        let mut machine = Machine::new();
        for step in &steps {
            machine.step(step);
        }
    }
}
