//! Guests that find, initialize and use their virtio functions.
use super::Seeds;
use crate::{pci::what as pci, transport::what as transport};

/// Returns a write to configuration space: device, register, bytes.
fn config(device: u8, register: u8, bytes: &[u8]) -> Vec<u8> {
    let number = u8::try_from(bytes.len()).expect("few");
    [&[pci::CONFIG, device, 0, register, number], bytes].concat()
}

/// Returns a write to a BAR: function, BAR, offset, bytes.
fn bar(function: u8, bar: u8, offset: u16, bytes: &[u8]) -> Vec<u8> {
    let [high, low] = offset.to_be_bytes();
    let number = u8::try_from(bytes.len()).expect("few");
    [&[pci::BAR, function | bar, high, low, number], bytes].concat()
}

pub(super) fn pci() -> Seeds {
    let size = [
        config(1, 0x10, &[0xff; 4]),
        vec![pci::CONFIG_READ, 1, 0, 0x10, 4],
    ]
    .concat();
    let by_ports = [
        &[pci::PORT, 0, 4, 0x18, 8, 0, 0x80][..],
        &[pci::PORT, 4, 4, 0, 0, 0, 1],
        &[pci::PORT_READ, 5, 2],
    ]
    .concat();
    let message = |function: u8| {
        [
            bar(function, 0, 16, &0xfee0_0000_u64.to_le_bytes()),
            bar(function, 0, 24, &[0x21, 0, 0, 0, 0, 0, 0, 0]),
            config(function + 1, 0x42, &[0, 0x80]),
        ]
        .concat()
    };
    // The access capability is the sixth: BAR 2, the status, one byte.
    let at = 0x98;
    let access = [
        config(1, at + 4, &[2]),
        config(1, at + 8, &[20, 0, 0, 0, 1, 0, 0, 0]),
        config(1, at + 16, &[1]),
        vec![pci::CONFIG_READ, 1, 0, at + 16, 4],
    ]
    .concat();
    let [second, place] = [(1_u64 << 36) + 0x4000, 1 << 36].map(u64::to_be_bytes);
    let overlap = [
        config(2, 0x18, &[0, 0, 0, 0, 16, 0, 0, 0]),
        [&[pci::MEMORY_READ], &place[..], &[8]].concat(),
        [&[pci::MEMORY], &second[..], &[1, 1]].concat(),
        config(1, 4, &[0]),
        [&[pci::MEMORY], &place[..], &[1, 1]].concat(),
    ]
    .concat();
    let up = [message(0), bar(0, 2, 20, &[0]), vec![pci::SIGNAL, 0, 0]].concat();
    vec![
        ("size", size),
        ("ports", by_ports),
        ("message", up),
        ("access", access),
        ("overlap", overlap),
    ]
}

pub(super) fn transport() -> Seeds {
    let bring_up = |function: u8, queues: u8, size: u16| {
        let [high, low] = size.to_be_bytes();
        let head = [transport::BRING_UP, function, 0, 0, 0, 0, 0, 0, 0, 0];
        [&head[..], &[queues, high, low]].concat()
    };
    let messages: Vec<u8> = (0..4)
        .flat_map(|vector| [transport::MESSAGE, 0, vector, 0x20 + vector])
        .collect();
    let up = [messages, bring_up(0, 7, 16)].concat();
    let memory = |at: u16, bytes: &[u8]| {
        let [high, low] = at.to_be_bytes();
        let number = u8::try_from(bytes.len()).expect("few");
        [&[transport::MEMORY, 0, high, low, number], bytes].concat()
    };
    // A buffer that the device writes, made available in queue 0.
    let buffer = [
        memory(0, &0x1_0000_u64.to_le_bytes()),
        memory(8, &[64, 0, 0, 0, 2, 0, 0, 0]),
        memory(0x404, &[0, 0]),
        memory(0x402, &[1, 0]),
    ];
    let served = [
        &up[..],
        &buffer.concat(),
        &[
            transport::NOTIFY,
            0,
            0,
            transport::SERVE,
            0,
            0,
            transport::STATUS,
            0,
            0,
        ],
    ];
    let masked = [
        &up[..],
        &[
            transport::MASK,
            0,
            1,
            1,
            transport::SIGNAL,
            0,
            0,
            transport::MASK,
            0,
            1,
            0,
        ],
        &[transport::SIGNAL, 0, 3, transport::NEEDS_RESET, 0],
    ];
    let queue = [
        &up[..],
        &[transport::RESET_QUEUE, 1, 0],
        &[transport::COMMON, 0, 28, 2, 1, 0, transport::SERVE, 0, 1],
    ];
    let moved = [
        &up[..],
        &[
            transport::MOVE,
            0,
            5,
            transport::NOTIFY,
            0,
            0,
            transport::MOVE,
            0,
            0x80,
        ],
        &[transport::COMMAND, 0, 2, transport::COMMAND, 0, 6],
    ];
    let refused = [
        &[transport::REFUSE, 0][..],
        &bring_up(0, 1, 16),
        &bring_up(0, 1, 3),
        &bring_up(1, 0, 16),
    ];
    vec![
        ("serve", served.concat()),
        ("mask", masked.concat()),
        ("reset-queue", queue.concat()),
        ("move", moved.concat()),
        ("refuse", refused.concat()),
    ]
}
