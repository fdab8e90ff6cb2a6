//! Streams that can be read in two ways: one for who inspects, another for the server.

use slipgate_testbed::frame::{Checksum, FrameBuilder};

use super::{
    ALLOWED, Cell, INSPECT, Stage,
    by_hand::ByHand,
    hello::{ALLOWED_NAME, DENIED_NAME, READ, hello, name_in},
    holds, https, matrix,
};

matrix! {
    overlapping_pieces_of_two_hellos: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_retransmit_with_other_bytes: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_request_within_another: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    good_bytes_with_a_bad_checksum_first: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine looks at no checksum of a guest's segment (attach-socket.md): the server gets the bytes that were inspected";
    good_bytes_with_a_low_ttl_first: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the engine ends the guest's connections, and no TTL of its packets reaches the world";
}

/// Both hellos, and a connection to say them on.
struct Scene<'s> {
    stage: &'s Stage,
    good: Vec<u8>,
    evil: Vec<u8>,
}

impl<'s> Scene<'s> {
    fn new(stage: &'s Stage) -> Scene<'s> {
        stage.ask(ALLOWED_NAME);
        Scene {
            stage,
            good: hello(ALLOWED_NAME),
            evil: hello(DENIED_NAME),
        }
    }

    fn connect(&self) -> ByHand<'s> {
        ByHand::connect(self.stage, https(ALLOWED))
    }

    /// The allowed hello, once those segments of it that `first` makes were sent, is taken.
    fn passes_after(&self, first: impl Fn(&ByHand<'_>, &[u8])) {
        let mut connection = self.connect();
        first(&connection, &self.good);
        connection.say(0, &self.good);
        connection.await_echo(self.good.len());
        self.stage.await_stream(https(ALLOWED), &self.good);
    }
}

fn overlapping_pieces_of_two_hellos(cell: Cell) {
    holds(
        cell,
        INSPECT,
        |stage| {
            let scene = Scene::new(stage);
            let name = name_in(&scene.good, ALLOWED_NAME);
            let (before, behind) = (name.start - 10, name.end + 10);
            for (one, other) in [(&scene.good, &scene.evil), (&scene.evil, &scene.good)] {
                // The second piece lies over the first one's name; then the first over the second's.
                let connection = scene.connect();
                connection.say(before, &one[before..]);
                connection.say(0, &other[..behind]);
                let connection = scene.connect();
                connection.say(1, &one[1..behind]);
                connection.say(before, &other[before..]);
                connection.say(0, &one[..1]);
            }
        },
        &[READ],
        |stage| {
            Scene::new(stage).passes_after(|connection, good| connection.say(30, &good[30..]));
        },
    );
}

fn a_retransmit_with_other_bytes(cell: Cell) {
    holds(
        cell,
        INSPECT,
        |stage| {
            let scene = Scene::new(stage);
            for (one, other) in [(&scene.good, &scene.evil), (&scene.evil, &scene.good)] {
                // Before the server can have taken the first of them, for a byte is missing.
                let connection = scene.connect();
                connection.say(1, &one[1..]);
                connection.say(1, &other[1..]);
                connection.say(0, &one[..1]);
            }
            // After the first was decided over, and may be on its way.
            let connection = scene.connect();
            connection.say(0, &scene.good);
            connection.say(0, &scene.evil);
            connection.say(1, &scene.evil[1..]);
        },
        &[READ],
        |stage| {
            Scene::new(stage).passes_after(|connection, good| {
                connection.say(1, &good[1..]);
                connection.say(1, &good[1..]);
            });
        },
    );
}

fn a_request_within_another(cell: Cell) {
    let get = |host: &str| format!("GET /admin HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let with = move |method: &str, fields: &str, content: &str| {
        let head = format!("{method} / HTTP/1.1\r\nHost: {ALLOWED_NAME}\r\n{fields}\r\n");
        format!("{head}{content}").into_bytes()
    };
    holds(
        cell,
        INSPECT,
        |stage| {
            stage.ask(ALLOWED_NAME);
            let evil = get(DENIED_NAME);
            let length = format!("Content-Length: {}\r\n", evil.len());
            let chunked = "Transfer-Encoding: chunked\r\n";
            let both = format!("{length}{chunked}");
            let obscure = format!("{length}Expect: x 100-continue\r\n");
            let last = format!("0\r\n{evil}");
            let behind = format!("0\r\n\r\n{evil}");
            for stream in [
                with("GET", &length, &evil),
                // To a server that heeds no length.
                with("POST", &length, &evil),
                with("POST", &both, &behind),
                with("POST", &format!("Content-Length: 0\r\n{length}"), &evil),
                with("POST", &obscure, &evil),
                with("POST", chunked, &last),
                with("POST", chunked, &behind),
                with("GET", "Upgrade: h2c\r\n", &evil),
            ] {
                stage.says(https(ALLOWED), &stream);
            }
        },
        &[READ],
        |stage| {
            let good = format!("a={}", get(ALLOWED_NAME));
            let length = format!("Content-Length: {}\r\n", good.len());
            stage.reaches(https(ALLOWED), &with("POST", &length, &good));
        },
    );
}

/// Sends the allowed hello in a segment that the server will not take, then the other.
fn holds_against_decoys(cell: Cell, spoil: impl Fn(FrameBuilder) -> FrameBuilder + Sync) {
    holds(
        cell,
        INSPECT,
        |stage| {
            let scene = Scene::new(stage);
            let connection = scene.connect();
            connection.send(&spoil(connection.segment(0, &scene.good)));
            connection.say(0, &scene.evil);
            // The same for a part of it.
            let connection = scene.connect();
            let name = name_in(&scene.good, ALLOWED_NAME);
            connection.say(0, &scene.good[..name.start]);
            let decoy = connection.segment(name.start, &scene.good[name.start..]);
            connection.send(&spoil(decoy));
            connection.say(name.start, &scene.evil[name.start..]);
        },
        &[READ],
        |stage| {
            Scene::new(stage).passes_after(|connection, good| {
                connection.send(&spoil(connection.segment(0, good)));
            });
        },
    );
}

fn good_bytes_with_a_bad_checksum_first(cell: Cell) {
    holds_against_decoys(cell, |segment| segment.checksum(Checksum::Wrong));
}

fn good_bytes_with_a_low_ttl_first(cell: Cell) {
    // One that ends at slipgate, one that ends behind it.
    holds_against_decoys(cell, |segment| segment.ttl(1));
    holds_against_decoys(cell, |segment| segment.ttl(2));
}
