// Prints the Java client's partitions for assorted keys; the tests compare ours with them.
// Run from the repository root, after `scripts/kafka.sh fetch`:
//   java -cp '.dev/kafka/libs/*' tests/golden/Murmur2Vectors.java > tests/golden/murmur2.txt

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Random;
import java.util.UUID;
import org.apache.kafka.common.utils.Utils;

public class Murmur2Vectors {
    public static void main(String[] args) {
        List<byte[]> keys = new ArrayList<>();
        keys.add(new byte[0]);
        Random random = new Random(20240917L);
        for (int length = 1; length <= 12; length++) {
            byte[] zeros = new byte[length];
            byte[] ones = new byte[length];
            byte[] counting = new byte[length];
            byte[] high = new byte[length];
            byte[] mixed = new byte[length];
            random.nextBytes(mixed);
            for (int i = 0; i < length; i++) {
                ones[i] = (byte) 0xff;
                counting[i] = (byte) (i + 1);
                high[i] = (byte) (0x80 + 9 * i);
            }
            keys.addAll(List.of(zeros, ones, counting, high, mixed));
        }
        for (String text : List.of(
                "1", "42", "-5", "0", "9223372036854775807", "-9223372036854775808",
                "a", "order-1", "order-12345", "the quick brown fox jumps over the lazy dog",
                "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff",
                "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "018f4e5c-7b1a-7c3d-9e2f-4a5b6c7d8e9f",
                "\u00e9", "\u00fc\u00df", "\u4e2d\u6587\u952e", "\u043a\u043b\u044e\u0447", "\u20ac100",
                "\ud83d\ude00", "caf\u00e9-\ud83d\ude80-\u65e5\u672c")) {
            keys.add(text.getBytes(StandardCharsets.UTF_8));
        }
        for (int i = 0; i < 10; i++) {
            keys.add(new UUID(random.nextLong(), random.nextLong()).toString().getBytes(StandardCharsets.UTF_8));
        }
        for (int i = 0; i < 200; i++) {
            byte[] key = new byte[random.nextInt(41)];
            random.nextBytes(key);
            keys.add(key);
        }

        StringBuilder out = new StringBuilder();
        out.append("# Made by tests/golden/Murmur2Vectors.java with kafka-clients 4.4.0 (how: see there). Per line:"
                + " key in hex ('-' if empty), Utils.murmur2, then Utils.toPositive of it % 1, 3, 6, 12, 97.\n");
        for (byte[] key : keys) {
            int hash = Utils.murmur2(key);
            out.append(key.length == 0 ? "-" : HexFormat.of().formatHex(key)).append(' ').append(hash);
            for (int partitions : new int[] {1, 3, 6, 12, 97}) {
                out.append(' ').append(Utils.toPositive(hash) % partitions);
            }
            out.append('\n');
        }
        System.out.print(out);
    }
}
