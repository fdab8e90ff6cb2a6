//! Sequences of ordinary guests' traffic on the in-memory kernel.
use slipgate_abi::tcp::Flags;
use userspace_nat::fake::packets;

use super::{Seeds, arp, dhcp, query};
use crate::{
    dress::bit,
    engine::{inspected::carries, step::what as step},
    tape::with_length,
    vms::{GUEST, PEER},
};

pub(super) fn engine() -> Seeds {
    let syn = [step::TCP, 0, 0, Flags::SYN, 1];
    let ack = [step::TCP, 0, 0, Flags::ACK, 2];
    let fin = [step::TCP, 0, 0, Flags::FIN | Flags::ACK, 2];
    let answer = |flags| [step::REPLY, 0, flags, 0, 0];
    let silence = [step::TIME, 3, 0x20, 0];
    let connection = [
        &[0][..],
        &syn,
        &answer(Flags::SYN | Flags::ACK),
        &ack,
        &fin,
        &answer(Flags::FIN | Flags::ACK),
        &ack,
        &silence,
    ];
    let question = with_length(&query(true));
    let udp = |to: u8, data: &[u8]| [&[step::UDP, 1, to][..], &with_length(data)].concat();
    let dressed = |packet: &[u8]| {
        let head = [step::GUEST, 0, bit::ALL, 0];
        [&head[..], &with_length(packet)].concat()
    };
    let discover = [
        &[step::HAND_OVER, 1, 7, 2, 0, 0][..],
        &with_length(&dhcp(1, &[])),
    ]
    .concat();
    let big = packets::may_fragment(packets::udp((GUEST, 1_000), (PEER, 443), &[7; 1_450]));
    let fragments = [
        &[0][..],
        &udp(0, b"first"),
        &dressed(&big),
        &[step::REPLY, 0, 0x80, 8, 0],
    ];
    let segment = |flags, place, acknowledged, carries| {
        [step::SEGMENT, 0, flags, place, acknowledged, carries]
    };
    let server = |flags, place, acknowledged, payload| {
        [step::SERVER, 0, flags, place, acknowledged, payload]
    };
    let ack = Flags::ACK;
    let released = [
        &[0][..],
        &segment(Flags::SYN, 0, 0, carries::NOTHING),
        &server(Flags::SYN | ack, 0, 1, 0),
        &segment(ack, 1, 1, carries::NOTHING),
        &segment(ack, 1, 1, carries::ALLOWED),
        &server(ack, 1, 255, 1),
    ]
    .concat();
    let again = [
        &segment(ack, 1, 1, carries::NOTHING)[..],
        &segment(ack, 1, 1, carries::DENIED),
        &segment(ack, 1, 1, carries::DENIED_LARGE),
    ]
    .concat();
    let cookies = [
        &released[..],
        &server(ack | Flags::RST, 60, 255, 0),
        &again,
        &silence,
    ];
    let ends = [
        &released[..],
        &segment(ack | Flags::RST, 2, 1, carries::LARGE),
        &again,
        &segment(Flags::SYN | Flags::FIN, 0, 0, carries::NOTHING),
        &server(ack | Flags::FIN, 1, 255, 3),
        &[step::RESTART],
        &again,
    ];
    let length = [0, u8::try_from(query(true).len()).unwrap_or(0)];
    let framed = with_length(&[&length[..], &query(true)].concat());
    let dns_stream = [
        &[0, step::TCP, 0, 2, Flags::SYN, 1][..],
        &[step::DNS_STREAM, 0, Flags::ACK, 0, 0],
        &[step::DNS_STREAM, 0, Flags::ACK],
        &framed,
        &silence,
    ];
    vec![
        ("connection", connection.concat()),
        (
            "dns",
            [&[0][..], &udp(4, &question[2..]), &udp(2, &question[2..])].concat(),
        ),
        ("dns-stream", dns_stream.concat()),
        ("cookies", cookies.concat()),
        ("ends", ends.concat()),
        (
            "dhcp-arp",
            [&[0][..], &discover, &[step::ARP, 0], &with_length(&arp())].concat(),
        ),
        ("fragments", fragments.concat()),
        (
            "errors",
            [
                &[0][..],
                &udp(0, b"x"),
                &[step::ERROR_FROM_WORLD, 3, 3, 0],
                &[step::REPLY, 0, 0, 0, 4],
                &[step::ERROR_FROM_GUEST, 1, 3, 3, 0],
                &[step::ECHO, 1, 0, step::REPLY, 0, 0, 0, 4],
            ]
            .concat(),
        ),
        (
            "faults",
            [
                &[1, step::FAULTS, 1, 1, 1, 1, 1][..],
                &syn,
                &udp(0, b"x"),
                &silence,
                &[step::RESTART],
            ]
            .concat(),
        ),
        (
            "broker",
            [
                &[0][..],
                &syn,
                &[
                    step::BROKER,
                    0,
                    6,
                    0,
                    step::BROKER,
                    0,
                    4,
                    1,
                    198,
                    51,
                    100,
                    7,
                    1,
                    0xbb,
                ],
                &[
                    step::BROKER,
                    0,
                    0,
                    step::BROKER,
                    0,
                    1,
                    step::BROKER,
                    0,
                    2,
                    5,
                    0,
                ],
                &[step::BROKER, 0, 3, 0, step::BROKER, 0, 5, 1],
                &syn,
            ]
            .concat(),
        ),
        (
            "world",
            [
                &[0, step::BROKER, 0, 6, 0][..],
                &[step::WORLD | step::LATER, bit::ALL, 0],
                &with_length(&packets::syn((PEER, 9_000), (crate::vms::HOST, 8_000), 5)),
                &[step::PORT_FRAME],
                &with_length(&[0; 40]),
            ]
            .concat(),
        ),
    ]
}
