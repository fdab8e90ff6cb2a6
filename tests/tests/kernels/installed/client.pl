# Exchanges with an echo server until the file STOP is there: a datagram and a segment of a connection
# in turn, each answered before the next is sent. So each packet that is lost is seen: a datagram by
# its answer, a segment by what the kernel has sent again.
use strict;
use warnings;
use IO::Socket::INET;
use Socket qw(IPPROTO_TCP TCP_NODELAY);
use Time::HiRes qw(time);

use constant { TCP_INFO => 11, MESSAGE_BYTES => 64, ANSWER_S => 2 };

my ($host, $port, $stop) = @ARGV;
my %peer = (PeerAddr => $host, PeerPort => $port);
my $tcp = IO::Socket::INET->new(%peer, Proto => 'tcp', Timeout => 10) or die "no connection: $@\n";
my $udp = IO::Socket::INET->new(%peer, Proto => 'udp') or die "no socket: $@\n";
$tcp->setsockopt(IPPROTO_TCP, TCP_NODELAY, 1);

# What comes within the time; less than a message otherwise.
sub answer {
    my ($socket) = @_;
    my $got = '';
    while (length $got < MESSAGE_BYTES) {
        my $ready = '';
        vec($ready, fileno $socket, 1) = 1;
        select($ready, undef, undef, ANSWER_S) or last;
        sysread($socket, $got, MESSAGE_BYTES - length $got, length $got) or last;
    }
    return $got;
}

my ($exchanges, $lost, $longest_s) = (0, 0, 0);
until (-e $stop) {
    my $message = sprintf '%0*d', MESSAGE_BYTES, $exchanges;
    for my $socket ($udp, $tcp) {
        my $began = time;
        syswrite $socket, $message;
        $lost++ if answer($socket) ne $message;
        my $took_s = time - $began;
        $longest_s = $took_s if $took_s > $longest_s;
    }
    $exchanges++;
}
# tcpi_total_retrans and tcpi_dsack_dups, <linux/tcp.h>: what was sent again, and how much of that the
# server had already. On a busy machine an answer may be late without any loss.
my ($again, $needless) = unpack 'x100 L x112 L', getsockopt($tcp, IPPROTO_TCP, TCP_INFO);
$again -= $needless;
printf "exchanges %d lost %d sent again %d longest %d ms\n", $exchanges, $lost, $again, $longest_s * 1000;
