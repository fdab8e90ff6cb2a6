use proptest::prelude::*;

use super::*;
use crate::{packet::checksum::Sum, test_vm};

pub(super) const GUEST: &str = "fe80::ff:fe00:f";
pub(super) const CLIENT: [u8; 10] = [0, 3, 0, 1, 2, 0, 0, 0, 0, 15];

pub(super) fn option(code: u16, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u16;
    [&code.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

pub(super) fn request(kind: u8, options: &[Vec<u8>]) -> Vec<u8> {
    [vec![kind, 1, 2, 3], options.concat()].concat()
}

/// A packet of a client, from its address and port to all servers.
pub(super) fn packet(from: &str, port: u16, to: u16, message: &[u8]) -> Vec<u8> {
    let datagram = Datagram {
        from: SocketAddr::new(from.parse().unwrap(), port),
        to: SocketAddr::new(ALL_SERVERS.into(), to),
        payload: message,
    };
    datagram.emit()
}

fn ask(message: &[u8]) -> Result<Option<Vec<u8>>, DropReason> {
    let vm = test_vm::vm6(1);
    let packet = packet(GUEST, 546, 547, message);
    let answer = handle(&vm, &vm.ipv6.unwrap(), &packet, false)?;
    Ok(answer.map(|answer| {
        assert_eq!(answer.address, AddressUse::Unchanged);
        answer.packet
    }))
}

/// Returns the options of a reply, and checks its headers.
fn options(reply: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let vm = test_vm::vm6(1);
    let net = vm.ipv6.unwrap();
    assert_eq!(
        reply[8..24],
        net.gateway_link_local(vm.gateway_mac).octets()
    );
    assert_eq!(reply[24..40], GUEST.parse::<Ipv6Addr>().unwrap().octets());
    let len = reply.len() - 40;
    assert_eq!(reply[40..46], [2, 35, 2, 34, 0, len as u8]);
    let sum = Sum::default()
        .bytes(&reply[8..40])
        .bytes(&[0, 0, 0, len as u8, 0, 0, 0, 17]);
    assert_eq!(sum.bytes(&reply[40..]).finish(), 0, "checksum");
    assert_eq!(reply[48..52], [7, 1, 2, 3], "a reply of this transaction");
    taken_apart(&reply[52..])
}

/// Takes options apart: code and data of each.
pub(super) fn taken_apart(mut rest: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut found = Vec::new();
    while !rest.is_empty() {
        let word = |at: usize| u16::from_be_bytes([rest[at], rest[at + 1]]);
        let len = usize::from(word(2));
        found.push((word(0), rest[4..4 + len].to_vec()));
        rest = &rest[4 + len..];
    }
    found
}

#[test]
fn rfc8415_an_information_request_is_answered_with_the_resolver() {
    let vm = test_vm::vm6(1);
    let server = [&[0, 3, 0, 1], &vm.gateway_mac[..]].concat();
    let resolver = vm.ipv6.unwrap().gateway().octets().to_vec();
    let asked = request(
        11,
        &[
            option(1, &CLIENT),
            option(8, &[0, 0]),
            option(6, &[0, 23, 0, 24]),
        ],
    );
    let reply = ask(&asked).unwrap().expect("a reply");
    let expected = [
        (1, CLIENT.to_vec()),
        (2, server.clone()),
        (23, resolver.clone()),
    ];
    assert_eq!(options(&reply), expected);
    // Without a client id or a list, also to a client that names this server.
    let bare = ask(&request(11, &[option(2, &server)]))
        .unwrap()
        .expect("a reply");
    let refresh = (32, 86_400_u32.to_be_bytes().to_vec());
    assert_eq!(options(&bare), [(2, server), (23, resolver), refresh]);
}

#[test]
fn rfc8415_what_is_not_for_this_server_is_not_answered() {
    let other = option(2, &[0, 3, 0, 1, 9, 9, 9, 9, 9, 9]);
    let address = option(3, &[0; 12]);
    for (what, message) in [
        ("another server's", request(11, &[other])),
        (
            "wants an address",
            request(11, std::slice::from_ref(&address)),
        ),
        ("solicit", request(1, &[option(1, &CLIENT), address])),
        ("renew", request(5, &[option(1, &CLIENT)])),
    ] {
        assert_eq!(ask(&message), Ok(None), "{what}");
    }
}

#[test]
fn bad_messages_are_dropped_by_reason() {
    let good = request(11, &[option(1, &CLIENT)]);
    let vm = test_vm::vm6(1);
    let net = vm.ipv6.unwrap();
    let told =
        |packet: &[u8]| handle(&vm, &net, packet, false).map(|answer| answer.map(|it| it.packet));
    let rejected = Err(DropReason::ServiceReject);
    assert_eq!(ask(&request(7, &[])), rejected, "a reply is not a client's");
    assert_eq!(ask(&request(12, &[])), rejected, "there are no relays");
    assert_eq!(ask(&[11, 1]), rejected);
    assert_eq!(
        ask(&request(11, &[vec![0, 1, 0, 9, 1]])),
        rejected,
        "beyond the end"
    );
    assert_eq!(
        ask(&request(11, &[option(1, &[0; 131])])),
        rejected,
        "too long a DUID"
    );
    assert_eq!(told(&packet(GUEST, 5_000, 547, &good)), rejected);
    assert_eq!(told(&packet(GUEST, 546, 548, &good)), rejected);
    for from in ["fd00:1:2:3::15", "2001:db8::1", "::"] {
        assert_eq!(
            told(&packet(from, 546, 547, &good)),
            Err(DropReason::Spoofed),
            "{from}"
        );
    }
    let mut short = packet(GUEST, 546, 547, &good);
    short[45] = 200;
    assert_eq!(told(&short), Err(DropReason::Malformed));
    short[45] = 7;
    assert_eq!(told(&short), Err(DropReason::Malformed));
    assert_eq!(told(&[0x60; 39]), Err(DropReason::Malformed));
}

proptest! {
    #[test]
    fn any_message_is_answered_or_refused(message in prop::collection::vec(any::<u8>(), 0..120)) {
        let mut message = message;
        if let Some(first) = message.first_mut() {
            *first = 11;
        }
        if let Ok(Some(reply)) = ask(&message) {
            prop_assert!(reply.len() <= 40 + 8 + 4 + 4 * 4 + 130 + 10 + 16 + 4);
        }
    }
}
