//! An Initial packet that opens by the keys of two connections. AES-GCM does not commit to a key:
//! the tag is linear in each block of the ciphertext, so one block can be solved for that makes the
//! tags of two keys alike.
use super::{
    tests::{heard, passage},
    *,
};
use crate::fake::{hellos, initials as made};

/// Multiplication in GHASH's field (NIST SP 800-38D section 6.3).
fn times(x: u128, y: u128) -> u128 {
    let (mut product, mut shifted) = (0, y);
    for bit in (0..128).rev() {
        if x >> bit & 1 == 1 {
            product ^= shifted;
        }
        let reduced = if shifted & 1 == 1 { 0xe1 << 120 } else { 0 };
        shifted = shifted >> 1 ^ reduced;
    }
    product
}

fn power(x: u128, exponent: u128) -> u128 {
    let one = 1 << 127;
    let bits = (0..128).rev().map(|bit| exponent >> bit & 1);
    bits.fold(one, |power, bit| {
        let square = times(power, power);
        if bit == 1 { times(square, x) } else { square }
    })
}

fn inverse(x: u128) -> u128 {
    power(x, u128::MAX - 1)
}

fn block(bytes: &[u8]) -> u128 {
    let mut block = [0; 16];
    block[..bytes.len()].copy_from_slice(bytes);
    u128::from_be_bytes(block)
}

/// Blocks that the tag covers: additional data, ciphertext, their lengths in bits.
fn blocks(header: &[u8], sealed: &[u8]) -> Vec<u128> {
    let lens = ((header.len() as u128 * 8) << 64) | (sealed.len() as u128 * 8);
    let all = header.chunks(16).chain(sealed.chunks(16)).map(block);
    all.chain([lens]).collect()
}

/// GHASH's key: the tags of nothing, and of 16 zero octets that are not encrypted, differ by it
/// times their length.
fn ghash_key(keys: &Keys) -> u128 {
    let tag = |header: &[u8]| block(&keys.seal(0, header, b""));
    times(tag(b"") ^ tag(&[0; 16]), inverse(128 << 64))
}

fn tag(keys: &Keys, number: u32, header: &[u8], sealed: &[u8]) -> u128 {
    let key = ghash_key(keys);
    let sum = blocks(header, sealed)
        .into_iter()
        .fold(0, |sum, block| times(sum ^ block, key));
    sum ^ block(&keys.seal(number.into(), b"", b""))
}

/// A datagram to this id that says these frames by the first keys, and anything by the second.
fn of_two_keys(keys: [&Keys; 2], destination: &[u8], frames: &[u8]) -> Vec<u8> {
    // CONNECTION_CLOSE, whose reason phrase hides the block.
    let mut payload = frames.to_vec();
    payload.extend([0x1c, 0, 0, 0x40, 64]);
    let free = payload.len().div_ceil(16);
    payload.resize(payload.len() + 64, 0);
    payload.resize(1_200, 0);
    for number in 0u32.. {
        let mut header = vec![0xc3, 0, 0, 0, 1, destination.len() as u8];
        header.extend(destination);
        header.extend([0, 0]);
        header.extend((0x4000 | (4 + payload.len() + 16) as u16).to_be_bytes());
        let number_at = header.len();
        header.extend(number.to_be_bytes());
        let mut sealed = keys[0].seal(number.into(), &header, &payload);
        sealed.truncate(payload.len());
        let sample = *sealed.first_chunk().unwrap();
        let masks = keys.map(|keys| keys.mask(sample));
        if (masks[0][0] ^ masks[1][0]) & 3 != 0 {
            // Their numbers had different lengths.
            continue;
        }
        let masked = |mut header: Vec<u8>, mask: [u8; 5]| {
            header[0] ^= mask[0] & 0x0f;
            for (octet, mask) in header[number_at..].iter_mut().zip(&mask[1..]) {
                *octet ^= mask;
            }
            header
        };
        let wire = masked(header.clone(), masks[0]);
        let other = masked(wire.clone(), masks[1]);
        let others = u32::from_be_bytes(*other[number_at..].first_chunk().unwrap());
        sealed[free * 16..][..16].fill(0);
        let apart = tag(keys[0], number, &header, &sealed) ^ tag(keys[1], others, &other, &sealed);
        let exponent = (sealed.len() / 16 - free + 1) as u128;
        let powers = keys.map(|keys| power(ghash_key(keys), exponent));
        let solved = times(apart, inverse(powers[0] ^ powers[1]));
        sealed[free * 16..][..16].copy_from_slice(&solved.to_be_bytes());
        let tag = tag(keys[0], number, &header, &sealed);
        return [&wire[..], &sealed, &tag.to_be_bytes()].concat();
    }
    unreachable!()
}

#[test]
fn a_packet_of_two_keys_is_read_as_its_destination_says() {
    let ids: [&[u8]; 2] = [b"flow a", b"flow b"];
    let keys = ids.map(|id| Keys::of_client(Version::One, id));
    let begin = || {
        let mut flow = Flow::default();
        for id in ids {
            let hello = made::crypto(0, &hellos::client_hello("a.test"));
            let first = made::initial(Version::One, id, id, 0, &hello);
            assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
            let called = [id, b"'s server"].concat();
            heard(&mut flow, &made::answer(Version::One, id, &called));
        }
        flow
    };
    let evil = hellos::client_hello("evil.test");
    let second = made::crypto(hellos::client_hello("a.test").len(), &evil);
    for destination in [ids[0].to_vec(), [ids[0], b"'s server"].concat()] {
        let packet = of_two_keys([&keys[0], &keys[1]], &destination, &second);
        let initial = initials(&packet).unwrap()[0];
        assert!(initial.open(&keys[0]).is_some() && initial.open(&keys[1]).is_some());
        assert_eq!(passage(&mut begin(), &packet), Err(Refused::Name));
    }
    // One that says nothing by the keys of whom it goes to is not read by another's.
    let packet = of_two_keys([&keys[1], &keys[0]], ids[0], &second);
    assert_ne!(passage(&mut begin(), &packet), Ok(Passage::Goes));
}

#[test]
fn a_packet_to_a_forged_id_that_begins_another_connection_is_dropped() {
    let (id, forged): (&[u8], &[u8]) = (b"flow a", b"forged id");
    let keys = [id, forged].map(|id| Keys::of_client(Version::One, id));
    let mut flow = Flow::default();
    let hello = hellos::client_hello("a.test");
    let first = made::initial(Version::One, id, id, 0, &made::crypto(0, &hello));
    assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
    heard(&mut flow, &made::answer(Version::One, id, forged));
    // Of the connection that is known.
    let ack = made::initial(Version::One, id, forged, 1, &[2, 0, 0, 0, 0]);
    assert_eq!(passage(&mut flow, &ack), Ok(Passage::Goes));
    // A server reads it by the other's.
    let packet = of_two_keys([&keys[0], &keys[1]], forged, &[2, 0, 0, 0, 0]);
    let initial = initials(&packet).unwrap()[0];
    assert!(initial.open(&keys[0]).is_some() && initial.open(&keys[1]).is_some());
    let judged = passage(&mut flow, &packet);
    assert_eq!(judged, Ok(Passage::Dropped));
}

/// A server answers a connection, and it is not known which: of too many that a client calls by one
/// id, of one that has made room, of one that it began by another id of its own than the server
/// saw. To the server what goes to its id is of that connection, whatever else it opens by.
#[test]
fn no_connection_begins_by_an_id_that_a_server_gave_itself() {
    let begin = |flow: &mut Flow, id: &[u8]| {
        let hello = made::crypto(0, &hellos::client_hello("a.test"));
        passage(flow, &made::initial(Version::One, id, id, 0, &hello))
    };
    let answer = |id: &[u8]| made::answer(Version::One, id, b"the server's");
    let of_another_client = |id: &[u8]| {
        let mut answer = answer(id);
        answer.splice(5..6, [3, 1, 2, 3]);
        answer
    };
    let handshake = |id: &[u8]| {
        let mut answer = answer(id);
        answer[0] = 0xe0;
        // Where there is a token's length, there is that of the packet.
        answer.remove(7 + b"the server's".len());
        answer
    };
    let ids: Vec<[u8; 8]> = (0..30).map(|at| [at; 8]).collect();
    let cases = [
        (1, answer(&ids[0]), true),
        (3, answer(&ids[0]), false),
        (30, answer(&ids[0]), false),
        (1, of_another_client(&ids[0]), false),
        (1, handshake(&ids[0]), false),
    ];
    for (at, (connections, answer, is_known)) in cases.iter().enumerate() {
        let mut flow = Flow::default();
        for id in &ids[..*connections] {
            assert_eq!(begin(&mut flow, id), Ok(Passage::Goes));
        }
        heard(&mut flow, answer);
        // By the keys of the connection it is let by where that is known.
        let ack = [2, 0, 0, 0, 0];
        let packet = made::initial(Version::One, &ids[0], b"the server's", 1, &ack);
        let expected = match is_known {
            true => Passage::Goes,
            false => Passage::Dropped,
        };
        assert_eq!(passage(&mut flow, &packet), Ok(expected), "{at}");
        // By those of the id itself it goes nowhere, alone or behind another's.
        let begins = begin(&mut flow, b"the server's");
        assert_eq!(begins, Ok(Passage::Dropped), "{at}");
        let both = [
            made::initial(
                Version::One,
                b"one more",
                b"one more",
                0,
                &made::crypto(0, &hellos::client_hello("a.test")),
            ),
            made::initial(
                Version::One,
                b"the server's",
                b"the server's",
                0,
                &made::crypto(0, &hellos::client_hello("a.test")),
            ),
        ];
        let both = passage(&mut flow, &both.concat());
        assert_eq!(both, Ok(Passage::Dropped), "{at}");
        assert_eq!(begin(&mut flow, b"any other"), Ok(Passage::Goes), "{at}");
    }
}

#[test]
fn an_answer_that_overtakes_the_first_one_hides_nothing() {
    let id: &[u8] = b"flow one";
    let mut flow = Flow::default();
    let hello = made::crypto(0, &hellos::client_hello("a.test"));
    let first = made::initial(Version::One, id, id, 0, &hello);
    assert_eq!(passage(&mut flow, &first), Ok(Passage::Goes));
    let answer = made::answer(Version::One, id, b"server");
    let mut handshake = answer.clone();
    handshake[0] = 0xe0;
    handshake.remove(7 + b"server".len());
    heard(&mut flow, &handshake);
    heard(&mut flow, &answer);
    let ack = made::initial(Version::One, id, b"server", 1, &[2, 0, 0, 0, 0]);
    assert_eq!(passage(&mut flow, &ack), Ok(Passage::Goes));
}

#[test]
fn a_server_of_endless_ids_ends_what_may_begin_and_is_not_remembered_without_end() {
    let mut flow = Flow::default();
    let id: &[u8] = b"flow one";
    let hello = made::crypto(0, &hellos::client_hello("a.test"));
    let begin =
        |flow: &mut Flow, id: &[u8]| passage(flow, &made::initial(Version::One, id, id, 0, &hello));
    assert_eq!(begin(&mut flow, id), Ok(Passage::Goes));
    let answer = made::answer(Version::One, b"nobody's", &[0; 8]);
    let at = answer.windows(8).position(|id| id == [0; 8]).unwrap();
    for number in 0..20_000u64 {
        let mut answer = answer.clone();
        answer[at..at + 8].copy_from_slice(&number.to_be_bytes());
        heard(&mut flow, &answer);
    }
    assert!(flow.held() < 1 << 19, "{} bytes", flow.held());
    let ack = made::initial(Version::One, id, id, 1, &[2, 0, 0, 0, 0]);
    assert_eq!(passage(&mut flow, &ack), Ok(Passage::Goes));
    assert_eq!(begin(&mut flow, b"flow two"), Err(Refused::Limit));
}
