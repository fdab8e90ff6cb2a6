//! First inputs of each target: data that ordinary guests, servers and users send.
mod balloon;
mod disk;
mod engine;
mod inspect;
mod kernel;
mod messages;
mod running_devices;
mod snapshot;
mod user_mode;
mod virtio;
mod virtio_net;
mod vsock;

use std::{fs, io, path::Path};

use slipgate_abi::tcp::Flags;
use userspace_nat::{fake::packets, port::VirtioNetHdr};

use crate::{
    dns::knob,
    dns_proxy::step,
    dress::bit,
    relay::what as relayed,
    services::MAC,
    tape::with_length,
    vms::{GATEWAY, GUEST, PEER, RESOLVER, ip},
};

type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Longest seed, bytes: `cargo xtask fuzz` has libFuzzer cut what is longer.
const MAX_BYTES: usize = 8_192;

/// Writes every seed to `corpus/<target>/<name>`.
///
/// # Errors
/// A file or directory can't be written.
///
/// # Panics
/// A seed is too long.
pub fn write(corpus: &Path) -> io::Result<()> {
    let all = [
        ("packet", packet()),
        ("dns", dns()),
        ("dns_proxy", dns_proxy()),
        ("services", services()),
        ("slaac", slaac()),
        ("framing", framing()),
        ("tcp", user_mode::tcp()),
        ("vhost_user", user_mode::vhost_user()),
        ("rules", rules()),
        ("policy", policy()),
        ("engine", engine::engine()),
        ("tls", inspect::tls()),
        ("http", inspect::http()),
        ("quic", inspect::quic()),
        ("reassembly", inspect::reassembly()),
        ("relay", relay()),
        ("messages", messages::messages()),
        ("virtio_net", virtio_net::virtio_net()),
        ("balloon", balloon::balloon()),
        ("disk", disk::disk()),
        ("vsock", vsock::vsock()),
        ("kernel", kernel::kernel()),
        ("pci", virtio::pci()),
        ("transport", virtio::transport()),
        ("snapshot", snapshot::snapshot()),
    ];
    for (target, seeds) in all {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder)?;
        for (name, bytes) in seeds {
            let length = bytes.len();
            assert!(length <= MAX_BYTES, "{target}/{name}: {length} bytes");
            fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}

fn packet() -> Seeds {
    let (guest, peer) = ((GUEST, 1_000), (PEER, 443));
    let syn = packets::tcp(guest, peer, Flags::SYN, 1, 0, SYN_OPTIONS, &[]);
    // The MSS at an odd place.
    let odd = [&[1], &SYN_OPTIONS[..4], &[1, 1, 1]].concat();
    let odd = packets::tcp(guest, peer, Flags::SYN, 1, 0, &odd, &[]);
    let data = packets::tcp(guest, peer, Flags::ACK, 1, 1, &[], &[7; 3_000]);
    let udp = packets::udp(guest, peer, b"question");
    let echo = packets::echo(GUEST, PEER, true, 7, b"data");
    let gso = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: VirtioNetHdr::GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1_448,
        csum_start: 34,
        csum_offset: 16,
    };
    let plain = VirtioNetHdr::default();
    let about = |packet| packets::icmp_error(PEER, GUEST, 3, 4, packet);
    let with = |vnet: VirtioNetHdr, l3: &[u8]| [&[0], &vnet.encode()[..], l3].concat();
    vec![
        ("syn", with(plain, &syn)),
        ("syn-odd", with(plain, &odd)),
        ("gso", with(gso, &data)),
        ("udp", with(plain, &udp)),
        ("echo", with(plain, &echo)),
        ("error-about-tcp", with(plain, &about(&syn))),
        ("error-about-udp", with(plain, &about(&udp))),
        ("error-about-echo", with(plain, &about(&echo))),
    ]
}

/// TCP options as Linux sends them: MSS, SACK permitted, timestamps, window scale.
const SYN_OPTIONS: &[u8] = &[
    2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7,
];

/// Returns the query for `host.example.`, type A.
fn query(edns: bool) -> Vec<u8> {
    let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns)];
    query.extend_from_slice(b"\x04Host\x07example\0\0\x01\0\x01");
    if edns {
        query.extend_from_slice(&[0, 0, 41, 4, 0xd0, 0, 0, 0x80, 0, 0, 0]);
    }
    query
}

/// Returns questions and answers of a guest that may ask for names beneath `ok.test`.
fn dns_proxy() -> Seeds {
    let step = |what: u8, bytes: &[u8]| [&[what], &with_length(bytes)[..]].concat();
    let ask = |qtype: u8, labels: &[u8]| step(step::ASK_BENEATH, &[&[qtype], labels].concat());
    let told =
        |counts: [u8; 3], records: &[u8]| step(step::ANSWER_RIGHT, &[&counts, records].concat());
    let a = b"\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\xc6\x33\x64\x07";
    let private = b"\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\x0a\0\0\x01";
    let cname = b"\xc0\x0c\0\x05\0\x01\0\0\x01\x2c\0\x0a\x03bad\x02ok\x04test\0";
    let https = b"\xc0\x0c\0\x41\0\x01\0\0\x01\x2c\0\x18\0\x01\0\0\0\0\x02\0\x05\0\x01\0\x03\x02h2\0\x05\0\x04\xfe\x0d\0\0";
    let soa = b"\xc0\x0f\0\x06\0\x01\0\0\x01\x2c\0\x18\xc0\x0c\xc0\x0c\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x05";
    vec![
        (
            "a",
            [ask(1, b"www"), told([1, 0, 0], a), ask(1, b"www")].concat(),
        ),
        ("cname", [ask(1, b"www"), told([1, 0, 0], cname)].concat()),
        ("https", [ask(65, b"www"), told([1, 0, 0], https)].concat()),
        ("negative", [ask(28, b"www"), told([0, 1, 0], soa)].concat()),
        (
            "rebinding",
            [ask(1, b"www"), told([1, 0, 0], private)].concat(),
        ),
        (
            "refused",
            [
                ask(16, b"www"),
                step(step::ASK, &query(true)),
                step(step::PASS, &[9]),
            ]
            .concat(),
        ),
        (
            "forged",
            [
                ask(1, b"www"),
                step(step::ANSWER, &query(false)),
                step(step::PASS, &[3]),
            ]
            .concat(),
        ),
    ]
}

fn dns() -> Seeds {
    let ask = |knobs: u8, query: &[u8], answer: &[u8]| {
        [&[knobs, 0x56, 0x78], &with_length(query)[..], answer].concat()
    };
    // The header as completed, then the records.
    let answer = |flags: [u8; 2], counts: [u8; 3], records: &[u8]| {
        let [an, ns, ar] = counts;
        let head = [0, 0, flags[0], flags[1], 0, 1, 0, an, 0, ns, 0, ar];
        [&head, records].concat()
    };
    let a = b"\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\xc6\x33\x64\x07";
    let soa = b"\xc0\x0c\0\x06\0\x01\0\0\x01\x2c\0\x18\xc0\x0c\xc0\x0c\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x05";
    let opt = b"\0\0\x29\x04\xd0\0\0\x80\0\0\0";
    let with_opt = answer([0x81, 0x80], [2, 0, 1], &[&a[..], a, opt].concat());
    // Too long for a reply by UDP: by the OPT alone, and far.
    let long = |records: u8| answer([0x81, 0x80], [records, 0, 0], &a.repeat(records.into()));
    let early_opt = answer([0x81, 0x80], [1, 0, 2], &[&a[..], opt, a].concat());
    vec![
        (
            "a",
            ask(
                knob::ANSWERS,
                &query(false),
                &answer([0x81, 0x80], [1, 0, 0], a),
            ),
        ),
        ("opt", ask(knob::ANSWERS, &query(true), &with_opt)),
        ("opt-not-last", ask(knob::ANSWERS, &query(true), &early_opt)),
        ("just-long", ask(knob::ANSWERS, &query(true), &long(75))),
        ("long", ask(knob::ANSWERS, &query(true), &long(90))),
        (
            "nxdomain",
            ask(
                knob::ANSWERS,
                &query(true),
                &answer([0x81, 0x83], [0, 1, 0], soa),
            ),
        ),
        (
            "truncated",
            ask(
                knob::ANSWERS,
                &query(false),
                &answer([0x83, 0x80], [1, 0, 0], &a[..9]),
            ),
        ),
        (
            "tcp",
            ask(knob::ANSWERS | knob::TCP, &query(true), &with_opt),
        ),
        (
            "refused",
            ask(
                0,
                &query(false),
                &[0x56, 0x78, 0x81, 5, 0, 0, 0, 0, 0, 0, 0, 0],
            ),
        ),
        (
            "resolv-conf",
            ask(
                0,
                &query(false),
                b"search example\nnameserver 192.0.2.53\nnameserver 2001:db8::1\noptions edns0\n",
            ),
        ),
    ]
}

/// Returns a DHCP message of this type with these further options.
fn dhcp(kind: u8, options: &[u8]) -> Vec<u8> {
    let mut message = vec![1, 1, 6, 0, 1, 2, 3, 4];
    message.resize(28, 0);
    message.extend_from_slice(&MAC);
    message.resize(236, 0);
    message.extend_from_slice(&[0x63, 0x82, 0x53, 0x63, 53, 1, kind]);
    message.extend_from_slice(options);
    message.push(255);
    packets::udp((ip(0, 0, 0, 0), 68), (ip(255, 255, 255, 255), 67), &message)
}

fn arp() -> Vec<u8> {
    let mut request = vec![0, 1, 8, 0, 6, 4, 0, 1];
    request.extend_from_slice(&MAC);
    request.extend_from_slice(&GUEST.octets);
    request.extend_from_slice(&[0; 6]);
    request.extend_from_slice(&GATEWAY.octets);
    request
}

/// Packets by which a guest configures its IPv6, without lengths and checksums, which the target
/// corrects.
fn slaac() -> Seeds {
    use crate::slaac::{GUEST_LOCAL, knob};
    let packet = |knobs: u8, source: [u8; 16], payload: &[u8]| {
        let mut packet = vec![knobs | knob::CORRECT, 0x60, 0, 0, 0, 0, 0, 58, 255];
        packet.extend_from_slice(&source);
        packet.extend_from_slice(&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 1]);
        packet.extend_from_slice(payload);
        packet
    };
    let own = |payload: &[u8]| packet(0, GUEST_LOCAL, payload);
    let mac = [&[1, 1][..], &MAC].concat();
    let gateway = [0xfd, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1];
    let solicitation = |target: &[u8; 16]| [&[135, 0, 0, 0, 0, 0, 0, 0], &target[..]].concat();
    let datagram = |message: &[u8]| [&[2, 34, 2, 35, 0, 0, 0, 0], message].concat();
    let dhcp = |message: &[u8]| packet(knob::DHCP, GUEST_LOCAL, &datagram(message));
    // About a single address, with the server's identity where the kind of message needs it.
    let about = |knobs: u8, kind: u8, options: &[u8]| {
        let client = [0, 1, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 9];
        let association = [0, 3, 0, 40, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 24];
        let own = [0x20, 1, 0xd, 0xb8, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x17];
        let head = [kind, 1, 2, 3];
        let message = [&head, &client[..], options, &association, &own, &[0; 8]].concat();
        let mut packet = packet(
            knob::DHCP | knob::SINGLE | knobs,
            GUEST_LOCAL,
            &datagram(&message),
        );
        // To all servers.
        packet[25..41].copy_from_slice(&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2]);
        packet
    };
    let server = [0, 2, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 1];
    let identified = [0, 1, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 9, 0, 6, 0, 2, 0, 23];
    vec![
        ("probe", packet(0, [0; 16], &solicitation(&gateway))),
        ("asks", own(&[solicitation(&gateway), mac.clone()].concat())),
        (
            "fixed",
            packet(
                knob::FIXED_MAC,
                GUEST_LOCAL,
                &[solicitation(&gateway), mac.clone()].concat(),
            ),
        ),
        (
            "router",
            own(&[&[133, 0, 0, 0, 0, 0, 0, 0][..], &mac].concat()),
        ),
        (
            "announces",
            own(&[&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &gateway].concat()),
        ),
        (
            "advertises",
            own(&[134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]),
        ),
        (
            "information",
            dhcp(&[&[11, 1, 2, 3][..], &identified].concat()),
        ),
        ("solicit", dhcp(&[&[1, 1, 2, 3][..], &identified].concat())),
        ("solicit-address", about(0, 1, &[])),
        ("rapid", about(0, 1, &[0, 14, 0, 0])),
        ("withheld", about(knob::WITHHELD, 1, &[])),
        ("request", about(0, 3, &server)),
        ("confirm", about(0, 4, &[])),
        ("renew", about(0, 5, &server)),
        ("rebind", about(0, 6, &[])),
        ("release", about(0, 8, &server)),
        (
            "prefix-too",
            about(0, 5, &[&server[..], &[0, 25, 0, 12], &[1; 12]].concat()),
        ),
    ]
}

fn services() -> Seeds {
    let with = |knobs: u8, packet: &[u8]| [&[knobs, bit::ALL], packet].concat();
    let selecting = [[50, 4], [10, 0], [2, 15], [54, 4], [10, 0], [2, 2]].concat();
    let identified = [61, 7, 1, 2, 0, 0, 0, 0, 9, 55, 3, 1, 3, 6, 57, 2, 5, 0xdc];
    vec![
        ("arp", with(1, &arp())),
        ("arp-fixed", with(3, &arp())),
        ("discover", with(0, &dhcp(1, &identified))),
        ("request", with(0, &dhcp(3, &selecting))),
        ("inform", with(2, &dhcp(8, &[]))),
        ("release", with(0, &dhcp(7, &[54, 4, 10, 0, 2, 2]))),
    ]
}

fn framing() -> Seeds {
    let framed = |len: u32| [&len.to_be_bytes()[..], &vec![5; len as usize]].concat();
    let frames = [42, 1_514, 0, 60].map(framed).concat();
    let with = |cuts: &[u16], stream: &[u8]| {
        let mut input = vec![cuts.len() as u8];
        input.extend(cuts.iter().flat_map(|cut| cut.to_be_bytes()));
        [&input, stream].concat()
    };
    let (guest, peer) = ((GUEST, 1_001), (PEER, 443));
    let segments = (0..6u32).map(|nth| {
        let (flags, len) = if nth == 5 { (8, 700) } else { (0, 1_000) };
        let flags = Flags::ACK | flags;
        let l3 = packets::tcp(guest, peer, flags, nth * 1_000, 1, &[], &vec![7; len]);
        let frame = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0], &l3[..]].concat();
        [&(frame.len() as u32).to_be_bytes(), &frame[..]].concat()
    });
    let segments = segments.collect::<Vec<_>>().concat();
    vec![
        ("segments", with(&[], &segments)),
        ("frames", with(&[1_500, 3], &frames)),
        ("bytes", with(&[1], &frames)),
        (
            "too-long",
            with(&[7], &[&frames[..], &[0, 1, 0, 14, 9]].concat()),
        ),
        ("cut", with(&[100], &frames[..700])),
    ]
}

fn policy() -> Seeds {
    let file = |text: &str| {
        let to = [&PEER.octets[..], &[0x01, 0xbb, 0]].concat();
        let list = with_length(b"203.0.113.0/24 # bad\nevil.test\n");
        [&to, &list[..], text.as_bytes()].concat()
    };
    vec![
        (
            "rules",
            file(concat!(
                "default = \"deny\"\non_reload = \"keep\"\nrules = [\n",
                "  { allow = [\"*.example.com:443/tcp\", \"198.51.100.0/24\"], comment = \"why\" },\n",
                "  { inspect = \"api.example.com:443\", http = \"first\" },\n",
                "  { deny = \"0.0.0.0/0:25\" },\n  { deny_file = \"list.txt\" },\n]\n",
            )),
        ),
        (
            "settings",
            file(concat!(
                "default = \"deny\"\n[quotas]\nmax_flows = 9\ntx_bytes_per_second = \"10M\"\n",
                "[dns]\nresolvers = [\"192.0.2.53:53\"]\ntypes = [\"TXT\"]\nttl_floor_s = 1\n[timers]\nudp_s = 120\n",
                "ttl_ceiling_s = 60\nmax_labels = 8\n",
                "[[forward]]\nprotocol = \"tcp\"\naddress = \"127.0.0.1\"\n",
                "host_port = \"80-81\"\nguest_port = \"90-91\"\n",
            )),
        ),
        (
            "named",
            file(concat!(
                "[policy.a]\ndefault = \"deny\"\nrules = [{ allow = \"api.example.com\" }]\n",
                "[policy.b]\ndefault = \"allow\"\n[[policy.b.rules]]\ndeny = \"10.0.0.0/8\"\n",
                "[vms]\na = \"a\"\n",
            )),
        ),
        ("cut", file("rules = [ { allow = \"")),
    ]
}

fn rules() -> Seeds {
    let to = |address: [u8; 4], lines: &str| {
        [&[0], &address[..], &[0x01, 0xbb, 0], lines.as_bytes()].concat()
    };
    vec![
        (
            "order",
            to(
                PEER.octets,
                "+198.51.100.7:443/tcp\n-198.51.100.0/24\n-0.0.0.0/0:25\n",
            ),
        ),
        (
            "protected",
            to(
                [10, 1, 2, 3],
                "+0.0.0.0/0\n+10.0.0.0/8\n-10.1.0.0/16/icmp\n",
            ),
        ),
        (
            "file",
            to(
                PEER.octets,
                "# denied\n\n203.0.113.0/24:8000-8010/udp\n198.51.100.7 # peer\n",
            ),
        ),
        (
            "wrong",
            to(
                PEER.octets,
                "+::1\n-10.0.0.1/8\n+1.2.3.4:0\n1.2.3.4/33\n+[::]:80\n",
            ),
        ),
    ]
}

fn relay() -> Seeds {
    let segment = |flags: u8, data: &[u8]| {
        [&[relayed::SEGMENT, 0, flags, 0, 0][..], &with_length(data)].concat()
    };
    let length = [0, u8::try_from(query(false).len()).unwrap_or(0)];
    let question = [&length[..], &query(false)].concat();
    let stream = [
        segment(Flags::SYN, &[]),
        segment(Flags::ACK, &[]),
        segment(Flags::ACK, &[&question[..], &question].concat()),
        [&[relayed::ANSWER][..], &with_length(&[9; 40])].concat(),
        segment(Flags::ACK, &[]),
        vec![relayed::TIME, 0x10, 0],
        segment(Flags::FIN | Flags::ACK, &[]),
    ];
    let many: Vec<u8> = (0..8)
        .flat_map(|port| [relayed::SEGMENT, port, Flags::SYN, 1, 0, 0, 0])
        .collect();
    let syn = packets::syn((GUEST, 1_001), (RESOLVER, 53), 1);
    let forward = [
        [&[relayed::CLIENT, 0][..], &with_length(b"to the guest")].concat(),
        [&[relayed::DATAGRAM][..], &with_length(b"to the client")].concat(),
        [&[relayed::CLIENT, 1][..], &with_length(b"another")].concat(),
    ];
    let to_host =
        |knobs: u8, flags: u8| [&[relayed::LOOPBACK, knobs, flags][..], &with_length(b"")].concat();
    let service = |knobs: u8| [&[relayed::SERVICE, knobs][..], &with_length(b"answer")].concat();
    let loopback = [
        to_host(0, 0),
        service(9),
        to_host(1, 0),
        to_host(2, 0),
        service(2),
        to_host(4, Flags::SYN),
        to_host(0, 0),
        service(0),
        to_host(0, 0),
    ];
    vec![
        ("dns-stream", stream.concat()),
        ("many", many),
        ("loopback", loopback.concat()),
        (
            "packet",
            [&[relayed::PACKET, bit::ALL][..], &with_length(&syn)].concat(),
        ),
        ("forward", forward.concat()),
    ]
}
