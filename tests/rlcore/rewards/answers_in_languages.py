"""The same three answers in 29 languages: of a few words, as a sentence, and around a formula."""

from __future__ import annotations

ANSWERS = {
    "en": {
        "short": "The answer is seven.",
        "sentence": "First we add the two numbers, and then we see that the sum is seven.",
        "formula": "We have $3 + 4 = 7$, so the result is \\boxed{7}.",
    },
    "de": {
        "short": "Die Antwort ist sieben.",
        "sentence": "Zuerst addieren wir die beiden Zahlen und sehen, dass die Summe sieben ist.",
        "formula": "Es gilt $3 + 4 = 7$, also ist das Ergebnis \\boxed{7}.",
    },
    "fr": {
        "short": "La réponse est sept.",
        "sentence": "Nous additionnons d'abord les deux nombres et nous voyons que la somme est sept.",
        "formula": "On a $3 + 4 = 7$, donc le résultat est \\boxed{7}.",
    },
    "es": {
        "short": "La respuesta es siete.",
        "sentence": "Primero sumamos los dos números y vemos que la suma es siete.",
        "formula": "Tenemos $3 + 4 = 7$, así que el resultado es \\boxed{7}.",
    },
    "it": {
        "short": "La risposta è sette.",
        "sentence": "Prima sommiamo i due numeri e vediamo che la somma è sette.",
        "formula": "Abbiamo $3 + 4 = 7$, quindi il risultato è \\boxed{7}.",
    },
    "pt": {
        "short": "A resposta é sete.",
        "sentence": "Primeiro somamos os dois números e vemos que a soma é sete.",
        "formula": "Temos $3 + 4 = 7$, logo o resultado é \\boxed{7}.",
    },
    "nl": {
        "short": "Het antwoord is zeven.",
        "sentence": "Eerst tellen we de twee getallen op en dan zien we dat de som zeven is.",
        "formula": "Er geldt $3 + 4 = 7$, dus het resultaat is \\boxed{7}.",
    },
    "sv": {
        "short": "Svaret är sju.",
        "sentence": "Först lägger vi ihop de två talen och ser att summan är sju.",
        "formula": "Vi har $3 + 4 = 7$, alltså är resultatet \\boxed{7}.",
    },
    "da": {
        "short": "Svaret er syv.",
        "sentence": "Først lægger vi de to tal sammen og ser, at summen er syv.",
        "formula": "Vi har $3 + 4 = 7$, så resultatet er \\boxed{7}.",
    },
    "fi": {
        "short": "Vastaus on seitsemän.",
        "sentence": "Ensin laskemme kaksi lukua yhteen ja näemme, että summa on seitsemän.",
        "formula": "Saamme $3 + 4 = 7$, joten tulos on \\boxed{7}.",
    },
    "pl": {
        "short": "Odpowiedź to siedem.",
        "sentence": "Najpierw dodajemy obie liczby i widzimy, że suma wynosi siedem.",
        "formula": "Mamy $3 + 4 = 7$, więc wynik to \\boxed{7}.",
    },
    "cs": {
        "short": "Odpověď je sedm.",
        "sentence": "Nejprve sečteme obě čísla a vidíme, že součet je sedm.",
        "formula": "Máme $3 + 4 = 7$, takže výsledek je \\boxed{7}.",
    },
    "hu": {
        "short": "A válasz hét.",
        "sentence": "Először összeadjuk a két számot, és látjuk, hogy az összeg hét.",
        "formula": "Azt kapjuk, hogy $3 + 4 = 7$, tehát az eredmény \\boxed{7}.",
    },
    "ro": {
        "short": "Răspunsul este șapte.",
        "sentence": "Mai întâi adunăm cele două numere și vedem că suma este șapte.",
        "formula": "Avem $3 + 4 = 7$, deci rezultatul este \\boxed{7}.",
    },
    "tr": {
        "short": "Cevap yedidir.",
        "sentence": "Önce iki sayıyı toplarız ve toplamın yedi olduğunu görürüz.",
        "formula": "Burada $3 + 4 = 7$ olduğundan sonuç \\boxed{7} olur.",
    },
    "vi": {
        "short": "Câu trả lời là bảy.",
        "sentence": "Trước hết ta cộng hai số và thấy rằng tổng bằng bảy.",
        "formula": "Ta có $3 + 4 = 7$, vậy kết quả là \\boxed{7}.",
    },
    "id": {
        "short": "Jawabannya adalah tujuh.",
        "sentence": "Pertama kita jumlahkan kedua bilangan itu dan kita lihat bahwa jumlahnya tujuh.",
        "formula": "Kita peroleh $3 + 4 = 7$, jadi hasilnya adalah \\boxed{7}.",
    },
    "ru": {
        "short": "Ответ: семь.",
        "sentence": "Сначала сложим два числа и увидим, что сумма равна семи.",
        "formula": "Имеем $3 + 4 = 7$, значит, ответ равен \\boxed{7}.",
    },
    "uk": {
        "short": "Відповідь: сім.",
        "sentence": "Спочатку додамо два числа й побачимо, що сума дорівнює семи.",
        "formula": "Маємо $3 + 4 = 7$, отже, відповідь дорівнює \\boxed{7}.",
    },
    "bg": {
        "short": "Отговорът е седем.",
        "sentence": "Първо събираме двете числа и виждаме, че сборът е седем.",
        "formula": "Имаме $3 + 4 = 7$, следователно резултатът е \\boxed{7}.",
    },
    "el": {
        "short": "Η απάντηση είναι επτά.",
        "sentence": "Πρώτα προσθέτουμε τους δύο αριθμούς και βλέπουμε ότι το άθροισμα είναι επτά.",
        "formula": "Έχουμε $3 + 4 = 7$, άρα το αποτέλεσμα είναι \\boxed{7}.",
    },
    "ar": {
        "short": "الجواب هو سبعة.",
        "sentence": "أولا نجمع العددين ونرى أن المجموع يساوي سبعة.",
        "formula": "لدينا $3 + 4 = 7$ إذن النتيجة هي \\boxed{7}.",
    },
    "fa": {
        "short": "پاسخ هفت است.",
        "sentence": "ابتدا دو عدد را جمع می\u200cکنیم و می\u200cبینیم که مجموع هفت است.",
        "formula": "داریم $3 + 4 = 7$ پس نتیجه برابر است با \\boxed{7}.",
    },
    "he": {
        "short": "התשובה היא שבע.",
        "sentence": "קודם נחבר את שני המספרים ונראה שהסכום הוא שבע.",
        "formula": "מתקיים $3 + 4 = 7$ ולכן התוצאה היא \\boxed{7}.",
    },
    "hi": {
        "short": "उत्तर सात है।",
        "sentence": "पहले हम दो संख्याओं को जोड़ते हैं और देखते हैं कि योग सात है।",
        "formula": "हमें $3 + 4 = 7$ मिलता है, इसलिए उत्तर \\boxed{7} है।",
    },
    "th": {
        "short": "คำตอบคือเจ็ด",
        "sentence": "ขั้นแรกเราบวกเลขสองตัวแล้วเห็นว่าผลรวมคือเจ็ด",
        "formula": "เราได้ $3 + 4 = 7$ ดังนั้นคำตอบคือ \\boxed{7}",
    },
    "ko": {
        "short": "정답은 칠입니다.",
        "sentence": "먼저 두 수를 더하면 합이 칠이라는 것을 알 수 있습니다.",
        "formula": "$3 + 4 = 7$이므로 답은 \\boxed{7}입니다.",
    },
    "zh": {
        "short": "答案是七。",
        "sentence": "首先我们把两个数字相加，可以看到它们的和是七。",
        "formula": "由 $3 + 4 = 7$ 可知，答案是 \\boxed{7}。",
    },
    "ja": {
        "short": "答えは七です。",
        "sentence": "まず二つの数を足すと、合計が七になることが分かります。",
        "formula": "$3 + 4 = 7$ なので、答えは \\boxed{7} です。",
    },
}
