//! Guests with sockets, ordinary and hostile ones.
use super::Seeds;
use crate::vsock::{how, op, what};

/// The first connection that a program asked for.
const CALLED: u8 = 0x80;

fn packet(which: u8, op: u16, how: u8, bytes: u16, room: u8, times: u8) -> Vec<u8> {
    let [high, low] = bytes.to_be_bytes();
    vec![what::PACKET, which, op as u8, how, high, low, room, times]
}

fn program(which: u8, does: u8, bytes: u16) -> Vec<u8> {
    let [high, low] = bytes.to_be_bytes();
    vec![what::PROGRAM, which, does, high, low]
}

fn lend(number: u8, bytes: u16) -> Vec<u8> {
    let [high, low] = bytes.to_be_bytes();
    vec![what::LEND, number, high, low, 20]
}

pub(super) fn vsock() -> Seeds {
    let begin = |knobs: u8| [&[0xff; 8][..], &[knobs]].concat();
    let all = vec![what::ALL];
    // A program's connection that the guest accepts, with a buffer of 2^12 bytes.
    let called = [
        begin(0),
        lend(15, 500),
        vec![what::CALL, 1, 0],
        all.clone(),
        packet(CALLED, op::RESPONSE, 0, 0, 12, 1),
        all.clone(),
    ]
    .concat();
    // A connection that the guest asks for and gets.
    let connected_to = |program: u8| {
        [
            begin(0),
            lend(15, 500),
            packet(0, op::REQUEST, 0, 0, 12, 1),
            all.clone(),
            vec![what::ANSWER, 0, program],
            all.clone(),
        ]
        .concat()
    };
    let connected = connected_to(0);
    // The program's socket is full, and the rest is held.
    let full = [connected_to(2), packet(0, op::RW, 0, 2_003, 12, 10)].concat();
    let both_ways = |which: u8| {
        [
            packet(which, op::RW, how::SPLIT, 700, 12, 3),
            program(0, 0, 900),
            all.clone(),
            program(0, 1, 5_000),
            packet(which, op::CREDIT_REQUEST, how::FORWARDED, 0, 12, 1),
            lend(7, 100),
            all.clone(),
            program(0, 2, 0),
            packet(which, op::SHUTDOWN, how::FORWARDED, 3, 12, 1),
            all.clone(),
        ]
        .concat()
    };
    let wrong: Vec<u8> = (0..8)
        .flat_map(|bit| packet(0, op::RW, 1 << bit, 64, 12, 1))
        .collect();
    vec![
        ("called", [called.clone(), both_ways(CALLED)].concat()),
        ("connected", [connected.clone(), both_ways(0)].concat()),
        (
            "credit",
            [
                called.clone(),
                program(0, 0, 20_000),
                lend(31, 2_000),
                all.clone(),
                packet(CALLED, op::CREDIT_REQUEST, how::FORWARDED, 0, 12, 1),
                all.clone(),
            ]
            .concat(),
        ),
        // There is room again, and the socket is not signalled yet, when more comes.
        (
            "held",
            [
                full.clone(),
                packet(0, op::CREDIT_REQUEST, 0, 0, 12, 1),
                vec![what::EXCHANGE],
                program(0, 1, 6_000),
                packet(0, op::RW, 0, 100, 12, 2),
                vec![what::EXCHANGE],
                program(0, 1, 3_000),
                all.clone(),
                packet(0, op::RW, 0, 900, 12, 2),
                all.clone(),
            ]
            .concat(),
        ),
        // The program reads nothing: its socket is full, then the window.
        (
            "beyond-the-window",
            [
                connected_to(2),
                packet(0, op::RW, 0, 2_003, 12, 80),
                all.clone(),
            ]
            .concat(),
        ),
        (
            "closed-while-held",
            [full, packet(0, op::SHUTDOWN, 0, 3, 12, 1), all.clone()].concat(),
        ),
        (
            "sent-after-the-end",
            [
                connected.clone(),
                packet(0, op::SHUTDOWN, 0, 2, 12, 1),
                all.clone(),
                packet(0, op::RW, 0, 40, 12, 1),
                all.clone(),
            ]
            .concat(),
        ),
        (
            "half-closed",
            [
                connected.clone(),
                packet(0, op::RW, 0, 500, 12, 1),
                packet(0, op::SHUTDOWN, 0, 2, 12, 1),
                program(0, 0, 2_000),
                all.clone(),
                program(0, 2, 0),
                all.clone(),
            ]
            .concat(),
        ),
        (
            "receives-no-more",
            [
                connected.clone(),
                program(0, 0, 2_000),
                packet(0, op::SHUTDOWN, 0, 1, 12, 1),
                all.clone(),
                packet(0, op::RW, 0, 300, 12, 1),
                all.clone(),
                packet(0, op::SHUTDOWN, 0, 2, 12, 1),
                all.clone(),
            ]
            .concat(),
        ),
        // There is no room for a header. The next driver is served.
        (
            "short-buffers",
            [
                begin(0),
                lend(0x80, 20),
                packet(0, op::RW, 0, 40, 12, 1),
                all.clone(),
                vec![what::RESET, 0],
                lend(3, 0),
                packet(0, op::RW, 0, 40, 12, 1),
                all.clone(),
            ]
            .concat(),
        ),
        (
            "crossed",
            [
                begin(0),
                lend(31, 1_000),
                (0..3)
                    .flat_map(|own| packet(own, op::REQUEST, 0, 0, 12, 1))
                    .collect(),
                all.clone(),
                vec![what::ANSWER, 2, 0, what::ANSWER, 0, 0, what::ANSWER, 0, 0],
                (0..3).flat_map(|own| program(own, 0, 300)).collect(),
                all.clone(),
                (0..3)
                    .flat_map(|own| packet(own, op::RW, 0, 300, 12, 1))
                    .collect(),
                all.clone(),
            ]
            .concat(),
        ),
        (
            "flood",
            [
                begin(1),
                packet(0, op::REQUEST, how::STRANGE, 0, 12, 90),
                vec![what::CALL, 0, 63, what::CALL, 0, 63, what::ALL],
                vec![what::CALL, 0, 63, what::CALL, 7, 63, what::ALL],
                vec![what::EXPIRE],
                lend(31, 0),
                all.clone(),
                packet(0, op::RW, 0, 5, 12, 255),
                all.clone(),
            ]
            .concat(),
        ),
        (
            "refused",
            [
                begin(0),
                lend(31, 0),
                packet(0, op::REQUEST, 0, 0, 12, 1),
                packet(1, op::REQUEST, 0, 0, 12, 2),
                packet(2, op::REQUEST, 0, 0, 12, 1),
                packet(3, op::REQUEST, 0, 0, 12, 1),
                all.clone(),
                vec![what::ANSWER, 0, 3, what::ANSWER, 1, 1, what::SIGNALS],
                packet(3, op::RST, 0, 0, 12, 1),
                vec![what::ALL, what::EXPIRE, what::GONE, what::ALL],
            ]
            .concat(),
        ),
        ("wrong", [connected.clone(), wrong, all.clone()].concat()),
        (
            "restored",
            [
                begin(1),
                vec![what::CALL, 0, 2, what::ALL, what::RESET, 1],
                lend(15, 500),
                vec![what::CALL, 0, 0],
                all.clone(),
            ]
            .concat(),
        ),
        (
            "raw",
            [
                connected,
                [
                    &[what::RAW, 1, 0][..],
                    &0x4000_u64.to_le_bytes(),
                    &60_u32.to_le_bytes(),
                    &[0, 0, 1],
                ]
                .concat(),
                all,
            ]
            .concat(),
        ),
    ]
}
