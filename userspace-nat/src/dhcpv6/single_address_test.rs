//! A guest with a single address gets it by DHCPv6 (RFC 8415), message by message.
use proptest::prelude::*;

use super::{
    message::code,
    tests::{CLIENT, GUEST, option, packet, request, taken_apart},
    *,
};
use crate::{packet::checksum::Sum, test_vm};

const OWN: &str = "2001:db8:7::17";
const ORIGINALS: &str = "2001:db8:7::16";
const IAID: [u8; 4] = [9, 8, 7, 6];

mod kind {
    pub(super) const SOLICIT: u8 = 1;
    pub(super) const ADVERTISE: u8 = 2;
    pub(super) const REQUEST: u8 = 3;
    pub(super) const CONFIRM: u8 = 4;
    pub(super) const RENEW: u8 = 5;
    pub(super) const REBIND: u8 = 6;
    pub(super) const REPLY: u8 = 7;
    pub(super) const RELEASE: u8 = 8;
    pub(super) const DECLINE: u8 = 9;
    pub(super) const INFORMATION_REQUEST: u8 = 11;
}

/// Codes of a status.
const SUCCESS: u16 = 0;
const NO_ADDRESSES: u16 = 2;
const NOT_ON_LINK: u16 = 4;
const USE_MULTICAST: u16 = 5;
const NO_PREFIX: u16 = 6;

fn ip(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

fn vm() -> VmNet {
    let mut vm = test_vm::vm6(1);
    vm.ipv6 = Some(GuestIpv6 {
        prefix: format!("{OWN}/128").parse().unwrap(),
        is_routed: true,
    });
    vm
}

/// An address with the lifetimes that a client may suggest.
fn address(text: &str) -> Vec<u8> {
    let data = [&ip(text).octets()[..], &[0, 0, 0, 9], &[0, 0, 0, 9]].concat();
    option(code::IA_ADDRESS, &data)
}

fn association(code: u16, id: [u8; 4], addresses: &[&str]) -> Vec<u8> {
    let times = match code {
        code::IA_TA => &[][..],
        _ => &[0; 8],
    };
    let all: Vec<u8> = addresses.iter().flat_map(|it| address(it)).collect();
    option(code, &[&id, times, &all].concat())
}

fn ia(addresses: &[&str]) -> Vec<u8> {
    association(code::IA_NA, IAID, addresses)
}

fn client() -> Vec<u8> {
    option(code::CLIENT_ID, &CLIENT)
}

fn server() -> Vec<u8> {
    option(code::SERVER_ID, &server_id(&vm()))
}

fn answer_of(message: &[u8]) -> Option<Answer> {
    let vm = vm();
    let packet = packet(GUEST, 546, 547, message);
    handle(&vm, &vm.ipv6.unwrap(), &packet, false).unwrap()
}

/// A message of the server: its type, its options, and what becomes of the address.
#[derive(Debug)]
struct Said {
    kind: u8,
    options: Vec<(u16, Vec<u8>)>,
    address: AddressUse,
}

impl Said {
    fn of(answer: &Answer) -> Self {
        let packet = &answer.packet;
        let len = packet.len() - 40;
        let pseudo = Sum::default()
            .bytes(&packet[8..40])
            .bytes(&(len as u32).to_be_bytes())
            .bytes(&[0, 0, 0, 17]);
        assert_eq!(pseudo.bytes(&packet[40..]).finish(), 0, "checksum");
        assert!(packet.len() <= 1_280, "{} bytes", packet.len());
        let message = &packet[48..];
        assert_eq!(message[1..4], [1, 2, 3], "the transaction");
        Self {
            kind: message[0],
            options: taken_apart(&message[4..]),
            address: answer.address,
        }
    }

    fn get(&self, code: u16) -> Option<&[u8]> {
        let found = self.options.iter().find(|option| option.0 == code);
        found.map(|option| &option.1[..])
    }

    fn status(&self) -> Option<u16> {
        status_in(&self.options)
    }

    /// The associations: id, T1 and T2, addresses with both lifetimes, status.
    fn associations(&self) -> Vec<Given> {
        let all = self.options.iter();
        let all = all.filter(|option| [code::IA_NA, code::IA_PD].contains(&option.0));
        all.map(|(_, data)| {
            let inner = taken_apart(&data[12..]);
            let addresses = inner.iter().filter(|it| it.0 == code::IA_ADDRESS);
            Given {
                id: data[..4].try_into().unwrap(),
                times: [word(&data[4..]), word(&data[8..])],
                addresses: addresses
                    .map(|(_, data)| {
                        let address: [u8; 16] = data[..16].try_into().unwrap();
                        (address.into(), word(&data[16..]), word(&data[20..]))
                    })
                    .collect(),
                status: status_in(&inner),
            }
        })
        .collect()
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Given {
    id: [u8; 4],
    times: [u32; 2],
    addresses: Vec<(Ipv6Addr, u32, u32)>,
    status: Option<u16>,
}

fn word(data: &[u8]) -> u32 {
    u32::from_be_bytes(data[..4].try_into().unwrap())
}

fn status_in(options: &[(u16, Vec<u8>)]) -> Option<u16> {
    let found = options.iter().find(|option| option.0 == code::STATUS);
    found.map(|(_, data)| u16::from_be_bytes([data[0], data[1]]))
}

fn ask(kind: u8, options: &[Vec<u8>]) -> Option<Said> {
    answer_of(&request(kind, options)).map(|answer| Said::of(&answer))
}

fn said(kind: u8, options: &[Vec<u8>]) -> Said {
    ask(kind, options).expect("an answer")
}

/// The VM's address, as it is given.
fn given() -> Given {
    Given {
        id: IAID,
        times: [3_600, 5_760],
        addresses: vec![(ip(OWN), 604_800, 2_592_000)],
        status: None,
    }
}

fn refused(id: [u8; 4], status: u16) -> Given {
    Given {
        id,
        times: [0, 0],
        addresses: Vec::new(),
        status: Some(status),
    }
}

#[test]
fn rfc8415_18_3_1_a_solicit_is_answered_with_an_advertisement_of_the_address() {
    let hints: [&[&str]; 3] = [&[], &[OWN], &[ORIGINALS]];
    for hint in hints {
        let said = said(kind::SOLICIT, &[client(), option(8, &[0, 0]), ia(hint)]);
        assert_eq!(said.kind, kind::ADVERTISE);
        assert_eq!(said.get(code::CLIENT_ID), Some(&CLIENT[..]));
        assert_eq!(said.get(code::SERVER_ID), Some(&server_id(&vm())[..]));
        assert_eq!(said.get(code::PREFERENCE), Some(&[255][..]));
        assert_eq!(said.associations(), [given()]);
        let resolver = ip("fd73:6c69:7067::1").octets();
        assert_eq!(said.get(code::RESOLVERS), Some(&resolver[..]));
        assert_eq!(said.address, AddressUse::Unchanged);
    }
}

#[test]
fn rfc8415_18_3_1_rapid_commit_is_answered_with_a_reply() {
    let rapid = option(code::RAPID_COMMIT, &[]);
    let said = said(kind::SOLICIT, &[client(), rapid.clone(), ia(&[])]);
    assert_eq!(said.kind, kind::REPLY);
    assert_eq!(said.get(code::RAPID_COMMIT), Some(&[][..]));
    assert_eq!(said.associations(), [given()]);
    assert_eq!(said.address, AddressUse::Granted(ip(OWN)));
}

#[test]
fn rfc8415_18_3_2_a_request_gets_the_address_and_another_is_not_on_the_link() {
    let of = |addresses: &[&str]| said(kind::REQUEST, &[client(), server(), ia(addresses)]);
    for addresses in [&[][..], &[OWN]] {
        let said = of(addresses);
        assert_eq!((said.kind, said.status()), (kind::REPLY, None));
        assert_eq!(said.associations(), [given()]);
        assert_eq!(said.address, AddressUse::Granted(ip(OWN)));
    }
    let said = of(&[ORIGINALS]);
    assert_eq!(said.associations(), [refused(IAID, NOT_ON_LINK)]);
    assert_eq!(said.address, AddressUse::Unchanged);
}

#[test]
fn rfc8415_18_3_4_renew_and_rebind_extend_the_address_and_end_another() {
    for (kind, ids) in [
        (kind::RENEW, vec![client(), server()]),
        (kind::REBIND, vec![client()]),
    ] {
        let of = |addresses: &[&str]| said(kind, &[&ids[..], &[ia(addresses)]].concat());
        assert_eq!(of(&[OWN]).associations(), [given()]);
        assert_eq!(of(&[OWN]).address, AddressUse::Granted(ip(OWN)));
        let mut changed = given();
        changed.addresses.push((ip(ORIGINALS), 0, 0));
        assert_eq!(of(&[ORIGINALS]).associations(), [changed]);
    }
}

#[test]
fn rfc8415_18_3_3_confirm_says_whether_the_addresses_are_the_vms() {
    let of = |associations: &[Vec<u8>]| ask(kind::CONFIRM, &[&[client()], associations].concat());
    let own = of(&[ia(&[OWN])]).unwrap();
    assert_eq!((own.kind, own.status()), (kind::REPLY, Some(SUCCESS)));
    assert!(own.associations().is_empty());
    for other in [vec![ia(&[ORIGINALS])], vec![ia(&[OWN, ORIGINALS])]] {
        assert_eq!(of(&other).unwrap().status(), Some(NOT_ON_LINK));
    }
    assert!(of(&[ia(&[])]).is_none(), "there is nothing to confirm");
    assert!(of(&[]).is_none());
}

#[test]
fn rfc8415_18_3_7_and_8_an_address_that_is_given_back_is_released_and_given_again() {
    for kind in [kind::RELEASE, kind::DECLINE] {
        let own = said(kind, &[client(), server(), ia(&[OWN])]);
        assert_eq!((own.kind, own.status()), (kind::REPLY, Some(SUCCESS)));
        assert_eq!(own.address, AddressUse::Released(ip(OWN)));
        let other = said(kind, &[client(), server(), ia(&[ORIGINALS])]);
        assert_eq!(other.address, AddressUse::Unchanged);
    }
    let again = said(kind::SOLICIT, &[client(), ia(&[])]);
    assert_eq!(again.associations(), [given()]);
}

#[test]
fn rfc8415_16_messages_without_the_right_identities_are_not_answered() {
    let other = option(code::SERVER_ID, &[0, 3, 0, 1, 9, 9, 9, 9, 9, 9]);
    let with_server = [kind::REQUEST, kind::RENEW, kind::RELEASE, kind::DECLINE];
    for kind in with_server {
        assert!(ask(kind, &[client(), server(), ia(&[OWN])]).is_some());
        for ids in [
            vec![client()],
            vec![server()],
            vec![client(), other.clone()],
        ] {
            let options = [&ids[..], &[ia(&[OWN])]].concat();
            assert!(ask(kind, &options).is_none(), "{kind}");
        }
    }
    for kind in [kind::SOLICIT, kind::CONFIRM, kind::REBIND] {
        assert!(ask(kind, &[client(), ia(&[OWN])]).is_some());
        for ids in [vec![], vec![client(), server()]] {
            let options = [&ids[..], &[ia(&[OWN])]].concat();
            assert!(ask(kind, &options).is_none(), "{kind}");
        }
    }
}

#[test]
fn rfc8415_18_4_what_is_sent_to_the_server_alone_is_to_be_sent_to_all() {
    let vm = vm();
    let net = vm.ipv6.unwrap();
    let sent = |kind: u8, ids: &[Vec<u8>]| {
        let message = request(kind, &[ids, &[ia(&[OWN])]].concat());
        let datagram = Datagram {
            from: SocketAddr::new(ip(GUEST).into(), 546),
            to: SocketAddr::new(net.gateway_link_local(vm.gateway_mac).into(), 547),
            payload: &message,
        };
        handle(&vm, &net, &datagram.emit(), false).unwrap()
    };
    for kind in [kind::REQUEST, kind::RENEW, kind::RELEASE, kind::DECLINE] {
        let said = Said::of(&sent(kind, &[client(), server()]).expect("an answer"));
        assert_eq!(said.status(), Some(USE_MULTICAST));
        assert!(said.associations().is_empty());
        assert_eq!(said.address, AddressUse::Unchanged);
    }
    for kind in [kind::SOLICIT, kind::CONFIRM, kind::REBIND] {
        assert_eq!(sent(kind, &[client()]), None);
    }
}

#[test]
fn one_association_has_the_address_and_no_other_kind_has_any() {
    let second = association(code::IA_NA, [2; 4], &[]);
    let temporary = association(code::IA_TA, [3; 4], &[]);
    let prefix = association(code::IA_PD, [4; 4], &[]);
    let all = [client(), temporary, ia(&[]), second, prefix];
    let both = said(kind::SOLICIT, &all);
    let expected = [
        given(),
        refused([2; 4], NO_ADDRESSES),
        refused([4; 4], NO_PREFIX),
    ];
    assert_eq!(both.associations(), expected);
    let temporary = both.get(code::IA_TA).unwrap();
    assert_eq!(temporary[..4], [3; 4]);
    assert_eq!(status_in(&taken_apart(&temporary[4..])), Some(NO_ADDRESSES));
    // The one that has it keeps it.
    let second = association(code::IA_NA, [2; 4], &[OWN]);
    let renewed = said(kind::RENEW, &[client(), server(), ia(&[]), second]);
    let kept = Given {
        id: [2; 4],
        ..given()
    };
    assert_eq!(renewed.associations(), [refused(IAID, NO_ADDRESSES), kept]);
    // A client that asks for prefixes alone gets nothing.
    let prefix = association(code::IA_PD, [4; 4], &[]);
    let none = said(kind::SOLICIT, &[client(), prefix]);
    assert_eq!(none.associations(), [refused([4; 4], NO_PREFIX)]);
}

#[test]
fn an_address_that_the_host_has_is_not_given() {
    let vm = vm();
    let net = vm.ipv6.unwrap();
    let rapid = option(code::RAPID_COMMIT, &[]);
    for (kind, options, expected) in [
        (kind::SOLICIT, vec![client(), rapid], kind::ADVERTISE),
        (kind::REQUEST, vec![client(), server()], kind::REPLY),
    ] {
        let message = request(kind, &[&options[..], &[ia(&[])]].concat());
        let packet = packet(GUEST, 546, 547, &message);
        let answer = handle(&vm, &net, &packet, true).unwrap().unwrap();
        let said = Said::of(&answer);
        assert_eq!(said.kind, expected);
        assert_eq!(said.associations(), [refused(IAID, NO_ADDRESSES)]);
        assert_eq!(said.address, AddressUse::Unchanged);
    }
}

#[test]
fn an_information_request_is_answered_as_without_an_address() {
    let said = said(kind::INFORMATION_REQUEST, &[client()]);
    assert_eq!(said.kind, kind::REPLY);
    assert!(said.get(code::RESOLVERS).is_some());
    assert!(ask(kind::INFORMATION_REQUEST, &[client(), ia(&[])]).is_none());
}

#[test]
fn malformed_and_oversized_messages_are_refused_and_the_largest_answer_fits() {
    let refuses = |options: &[Vec<u8>]| {
        let vm = vm();
        let message = request(kind::RENEW, options);
        let packet = packet(GUEST, 546, 547, &message);
        handle(&vm, &vm.ipv6.unwrap(), &packet, false) == Err(DropReason::ServiceReject)
    };
    let short = [3, 0, 0, 3, 7].map(|len| option(code::IA_NA, &vec![0; len]));
    for bad in short {
        assert!(refuses(&[client(), server(), bad]));
    }
    let cut = option(code::IA_NA, &[&[0; 12][..], &[0, 5, 0, 24, 1]].concat());
    let short_address = option(
        code::IA_NA,
        &[&[0; 12][..], &option(code::IA_ADDRESS, &[0; 23])].concat(),
    );
    for bad in [cut, short_address, vec![0, 3, 0], vec![0, 3, 0, 9, 1]] {
        assert!(refuses(&[client(), server(), bad]));
    }
    // As much as a client may ask for.
    let long = option(code::CLIENT_ID, &[7; 130]);
    let all = ["2001:db8::99"; MAX_ADDRESSES];
    let mut most = vec![long, server(), ia(&all)];
    most.resize(2 + MAX_ASSOCIATIONS, ia(&[]));
    let said = said(kind::RENEW, &most);
    assert_eq!(said.associations().len(), MAX_ASSOCIATIONS);
    most.push(ia(&[]));
    assert!(refuses(&most), "one more association");
    let more = ["2001:db8::99"; MAX_ADDRESSES + 1];
    assert!(
        refuses(&[client(), server(), ia(&more)]),
        "one more address"
    );
}

proptest! {
    #[test]
    fn any_message_is_answered_with_the_vms_address_or_refused(
        kind in 0_u8..14,
        tail in prop::collection::vec(any::<u8>(), 0..80),
        addresses in prop::collection::vec(any::<[u8; 16]>(), 0..4),
        names_server: bool,
    ) {
        let texts: Vec<String> = addresses.iter().map(|it| Ipv6Addr::from(*it).to_string()).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut options = vec![client(), ia(&texts)];
        if names_server {
            options.push(server());
        }
        options.push(tail);
        let vm = vm();
        let packet = packet(GUEST, 546, 547, &request(kind, &options));
        if let Ok(Some(answer)) = handle(&vm, &vm.ipv6.unwrap(), &packet, false) {
            let said = Said::of(&answer);
            for given in said.associations() {
                for (address, preferred, valid) in given.addresses {
                    prop_assert!(address == ip(OWN) || (preferred, valid) == (0, 0));
                }
            }
            if let AddressUse::Granted(address) | AddressUse::Released(address) = said.address {
                prop_assert_eq!(address, ip(OWN));
            }
        }
    }
}
